"""`python -m palimpsa_surgery` is the command `palimpsa`: what `accelerate launch -m` starts in every process."""

from .cli import main

if __name__ == "__main__":
    main()
