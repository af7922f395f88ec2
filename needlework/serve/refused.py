"""A request that is not answered: OpenAI's error object and its status."""


class RefusedError(Exception):
    """A request that is not answered. param: the field, in OpenAI's error object."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        code: str | None = None,
        retry_after: float | None = None,
    ):
        super().__init__(message)
        self.status, self.retry_after = status, retry_after
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
