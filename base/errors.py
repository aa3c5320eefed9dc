"""The errors a user may see. Each message is one sentence: what was wrong, what was expected, where, what to do."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_CHECK_FAILED = 0, 1, 2, 3


class PalimpsaError(ValueError):
    """Base of every error this package raises on purpose; the command line prints it without a traceback."""

    exit_code = EXIT_FAILED


class UsageError(PalimpsaError):
    """What was asked for makes no sense: an option, a layer list, a recipe key."""

    exit_code = EXIT_USAGE


class CheckpointError(PalimpsaError):
    """A checkpoint cannot be read, or is of a kind that is not supported."""


class ChangedFileError(CheckpointError):
    """A file of a checkpoint was written to or cut short while it was read."""


class SchemaError(PalimpsaError):
    """A file written by a stage (or by hand) does not follow its schema."""


class OutputExistsError(UsageError):
    """The output is there already and `--force` was not given."""


class OutputError(PalimpsaError):
    """An output cannot be written: the disk is full, or the place is not writable."""


class DataError(PalimpsaError):
    """Text cannot be read or tokenized."""


class VerificationError(PalimpsaError):
    """A converted model does not equal its source: nothing is written."""

    exit_code = EXIT_CHECK_FAILED


class KernelUnavailableError(PalimpsaError):
    """A kernel backend was asked for by name, or required, and cannot run here."""


class TrainingError(PalimpsaError):
    """Fine-tuning had to stop: a loss that is not finite, data that ran out, a run that cannot be resumed."""


class EvaluationError(PalimpsaError):
    """A model cannot be evaluated: a loss that is not finite, a harness that is missing or stops."""


class HubError(PalimpsaError):
    """The Hub refuses, or cannot be reached."""
