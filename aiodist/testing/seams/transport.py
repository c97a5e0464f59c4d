"""The interface of a transport: operations are started, polled and finished."""

from aiodist.backends.base import DTYPES, Capabilities, Done, Exchange, Primitive, Transport, Wanted, tag_of

__all__ = ["DTYPES", "Capabilities", "Done", "Exchange", "Primitive", "Transport", "Wanted", "tag_of"]
