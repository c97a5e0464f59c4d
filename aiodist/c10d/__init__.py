"""`torch.distributed` on aiodist: DDP, FSDP2, DTensor and pipelines run unchanged over `init_process_group("aiodist")`.

Importing this module registers the backend, which torch from 2.14 on does by itself. Where a program is asyncio's,
`wrap` makes its communicator torch's default process group.

`calls` is the map from torch's calls to ours, `work` what a call returns, `home` the loop that the communicators live
on and how ranks meet, `hooks` puts DDP's buckets into the arena.
"""

from aiodist.c10d.calls import AiodistProcessGroup, create
from aiodist.c10d.home import Home, register, wrap
from aiodist.c10d.hooks import ddp_hook

__all__ = ["AiodistProcessGroup", "Home", "ddp_hook", "register_backend", "wrap"]


def register_backend() -> None:
    """Tell torch of the backend; importing this module does it, and torch's entry point from 2.14 on."""
    register("aiodist", create)


register_backend()
