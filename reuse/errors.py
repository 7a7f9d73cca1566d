"""The exceptions a user can meet. Every message says what is wrong, the numbers, and what to do."""


class LazyInlineError(Exception):
    """Base of every error that lazyinline raises on purpose."""


class CaptureError(LazyInlineError):
    """The model's Python cannot be turned into a program; the message names the user's line."""


class FinalCaptureError(CaptureError):
    """The model must not run itself instead: that would not be right, or not what was asked for."""


class ReuseError(LazyInlineError):
    """A mark or an option about sharing blocks is wrong."""


class DecompositionError(LazyInlineError):
    """A rule that takes an operator apart is wrong, or cannot be the operator's."""


class PlanError(LazyInlineError):
    """A program cannot be laid out or run as asked."""


class PipelineError(LazyInlineError):
    """A model cannot be split over the stages asked for."""


class ExportError(LazyInlineError):
    """A program cannot be written as ONNX."""


class CacheError(LazyInlineError):
    """The on-disk cache cannot be used as asked."""


class CacheWarning(UserWarning):
    """An entry of the on-disk cache, or the cache, was not used; what it held is made anew."""


class VerifyError(LazyInlineError):
    """A program breaks a rule of its level. This is a bug of lazyinline, not of the model."""


for _public in (
    LazyInlineError,
    CaptureError,
    ReuseError,
    DecompositionError,
    PlanError,
    PipelineError,
    ExportError,
    CacheError,
    VerifyError,
):
    _public.__module__ = "lazyinline"  # a traceback shows the name that users catch
