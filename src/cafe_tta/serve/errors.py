"""What a client is told when there is no answer."""


class ServeError(Exception):
    """An answer that is an error: its HTTP status, its text, and when to come again."""

    def __init__(self, status: int, text: str, retry_after: int | None = None, close: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.retry_after = retry_after  # seconds
        self.close = close  # the connection: what is left of the request was not read


def bad_request(text: str) -> ServeError:
    return ServeError(400, text)
