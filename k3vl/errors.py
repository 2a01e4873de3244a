"""The one tree of errors; it is part of the public interface.

::

    K3VLError
     +-- RequestError        the caller's request is at fault (HTTP 400)
     |    +-- MediaError     a picture or a clip: fetch, decode, limit, unsupported
     |    +-- TemplateError  messages that K3's chat format cannot express
     +-- CapacityError       too much for now or for ever (429 / 503)
     +-- Cancelled           the caller went away (499)
     +-- BackendError        the engine failed or is gone (500)
     |    +-- BackendAnswerError       an endpoint behind us answers nonsense, or breaks off (502)
     |    +-- BackendUnavailableError  it cannot be reached, or takes nothing now (503)
     |    +-- BackendTimeoutError      it does not answer in time (504)
     +-- ConfigError         config.json or flags (start-up, exit 1)
     +-- WeightError         checkpoint tensors (start-up, exit 1)
     +-- ShapeError          an op was called with disagreeing shapes

Messages name the offender and the values that disagree. They never hold media bytes or the
``repr`` of an object. Only the outermost layer turns an error into an HTTP status or an exit code.
"""


class K3VLError(Exception):
    """Base of everything this package raises on purpose."""


class RequestError(K3VLError):
    """The request cannot be served as it stands.

    Attributes:
        param: the offending field, e.g. ``messages[1].content[0]``; None when it is the whole.
        code: stable machine-readable word, e.g. ``image_truncated``.
    """

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_request"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class MediaError(RequestError):
    """A picture or a video cannot be used; ``code`` says why (``image_empty``, ...)."""


class TemplateError(RequestError):
    """The conversation cannot be expressed in K3's chat format."""


class CapacityError(K3VLError):
    """The engine cannot take the request.

    Attributes:
        retry_after: seconds after which a retry may succeed; None when it never will.
    """

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Cancelled(K3VLError):  # noqa: N818 - an outcome that the caller asked for, not a fault
    """The request was cancelled before it finished."""


class BackendError(K3VLError):
    """The engine failed, or its thread is dead."""


class BackendAnswerError(BackendError):
    """An endpoint behind this one failed, or sent what is no answer."""


class BackendUnavailableError(BackendError):
    """An endpoint behind this one cannot be reached, or takes no requests now."""


class BackendTimeoutError(BackendError):
    """An endpoint behind this one did not answer in time."""


class ConfigError(K3VLError):
    """A configuration file or a flag is missing, contradictory or not understood."""


class WeightError(K3VLError):
    """A checkpoint lacks tensors, has tensors left over, or a tensor has the wrong shape."""


class ShapeError(K3VLError):
    """Two tensors disagree; the message holds both shapes."""
