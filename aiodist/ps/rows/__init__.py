"""Tables of rows on servers: ids to rows that are made when they are first pushed, and updated by themselves.

Read in this order: `spec` (what a table is, and what its rows begin with), `ids` (where a row lies, and what travels),
`store` (the rows of one server), `shard` (a table among the shards of a server). A client's side is
`aiodist.ps.table`.
"""

from aiodist.ps.rows.spec import Constant, Normal, TableSpec, Uniform

__all__ = ["Constant", "Normal", "TableSpec", "Uniform"]
