"""`torch.distributed` on aiodist: DDP, FSDP2, DTensor and pipelines run unchanged over `init_process_group("aiodist")`.

The import of this module registers the backend. From torch 2.14 on, torch imports the module. In an asyncio program,
`wrap` makes a communicator torch's default process group.

`calls` maps torch's calls to calls of a communicator, `work` has their results, `home` the loop and the rendezvous, and
`hooks` averages DDP's gradients in one pass.
"""

from aiodist.c10d.calls import AiodistProcessGroup, create
from aiodist.c10d.home import Home, register, wrap
from aiodist.c10d.hooks import ddp_hook

__all__ = ["AiodistProcessGroup", "Home", "ddp_hook", "register_backend", "wrap"]


def register_backend() -> None:
    """Register the backend with torch. The import of this module makes the call."""
    register("aiodist", create)


register_backend()
