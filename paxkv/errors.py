"""Why a request was not served, where its settings are not the reason (that is a `ValueError`)."""


class RequestError(RuntimeError):
    """A request was not served."""


class QueueFull(RequestError):
    """As many requests wait as may; try again later."""


class DeadlineExceeded(RequestError):
    """A request took longer than its `timeout_seconds`."""


class NoToken(RequestError):
    """No token could be chosen."""
