"""Surgery on pretrained Mamba2 models: measured forgetting, Palimpsa-M layers, proved conversions."""

__version__ = "0.1.0"
