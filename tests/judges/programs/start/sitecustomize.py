# Changes functions of others, which have no types.
# mypy: ignore-errors
"""Start-up of the judges' processes: writes down groups, losses and weights, and lets programs for CUDA run on the CPU.

JUDGES_RECORD is the folder for `RANK.jsonl`. With JUDGES_CPU, a program that asks for accelerators finds JUDGES_CPU of
them, which are the CPU, so that programs of others run without a change. Over gloo, "nccl" is gloo then.
"""

import json
import os
import sys
from contextlib import nullcontext
from functools import wraps
from pathlib import Path

FOLDER, COUNT = os.environ.get("JUDGES_RECORD"), os.environ.get("JUDGES_CPU")


def record() -> None:
    """Write each new default group, the value of each loss, and the sum of all weights after each step."""
    import torch
    import torch.distributed.distributed_c10d as c10d
    from torch.optim.optimizer import register_optimizer_step_post_hook

    update, backward = c10d._update_default_pg, torch.Tensor.backward

    def write(**facts: object) -> None:
        with (Path(str(FOLDER)) / f"{os.environ.get('RANK', os.getpid())}.jsonl").open("a") as lines:
            print(json.dumps(facts), file=lines)

    def recorded_update(group: object) -> None:
        update(group)
        if isinstance(group, c10d.ProcessGroup):
            backend = type(group._get_backend(torch.device("cpu"))).__name__
            write(group=backend, size=group.size(), test=os.environ.get("PYTEST_CURRENT_TEST"))

    @wraps(backward)
    def recorded_backward(loss: torch.Tensor, *args: object, **named: object) -> None:
        backward(loss, *args, **named)
        write(loss=float(loss.detach().double().sum()))

    def recorded_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        weights = (weight.detach() for group in optimizer.param_groups for weight in group["params"])
        local = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
        write(weights=sum(float(weight.double().abs().sum()) for weight in local))

    c10d._update_default_pg, torch.Tensor.backward = recorded_update, recorded_backward
    register_optimizer_step_post_hook(recorded_step)


def accelerators_of_cpu(count: int) -> None:
    """Let `count` accelerators be the CPU, with seeds by rank and little data."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    def without(function, *names):
        @wraps(function)
        def called(*args, **named):
            return function(*args, **{name: value for name, value in named.items() if name not in names})

        return called

    def on_cpu(function):
        @wraps(function)
        def called(self, *args, **named):
            return function(self, *("cpu" if type(arg) is int else arg for arg in args), **named)

        return called

    torch.manual_seed(int(os.environ.get("RANK", 0)))
    torch.empty_like = torch.zeros_like  # FSDP2's example leaves a part of its weights as they are in memory
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda **_: torch.device("cpu")
    torch.accelerator.device_index = nullcontext
    torch.accelerator.device_count = lambda: count
    torch.accelerator.set_device_index = torch.cuda.set_device = lambda *_: None
    torch.Tensor.to, torch.nn.Module.to = on_cpu(torch.Tensor.to), on_cpu(torch.nn.Module.to)
    DistributedDataParallel._check_comm_hook = lambda *_: None  # it allows bfloat16 for CUDA alone
    for kind, names in ((DistributedDataParallel, ("device_ids", "output_device")), (DataLoader, ("pin_memory",))):
        kind.__init__ = without(kind.__init__, *names)
    init = dist.init_process_group

    @wraps(init)
    def init_process_group(*args: object, **named: object) -> None:
        named.pop("device_id", None)
        if named.get("backend") == "nccl" and "AIODIST_AS" not in os.environ:
            named["backend"] = "gloo"
        init(*args, **named)

    dist.init_process_group = init_process_group


def accelerate_of_cpu() -> None:
    """Let Accelerate join uneven inputs on the CPU too; seed the data of its scripts by rank."""
    import numpy
    from accelerate import Accelerator, DistributedType

    fresh, rank = numpy.random.default_rng, int(os.environ.get("RANK", 0))
    numpy.random.default_rng = lambda seed=None: fresh(rank if seed is None else seed)
    Accelerator.multi_device = property(lambda self: self.distributed_type == DistributedType.MULTI_CPU)


def little_data() -> None:
    """Let fake data sets of torchvision have 24 items; define its operators, if its library is for another torch."""
    import torch

    if not torch._C._dispatch_has_kernel("torchvision::nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        sys.modules["judges.torchvision"] = library
    from torchvision.datasets import FakeData

    init = FakeData.__init__
    FakeData.__init__ = lambda self, size, *args: init(self, 24, *args)


if FOLDER and not {"torch.distributed.run", "accelerate.commands.launch"} & set(sys.orig_argv):
    record()
    if COUNT:
        accelerators_of_cpu(int(COUNT))
        if any("accelerate" in argument for argument in sys.orig_argv):
            accelerate_of_cpu()
    if "JUDGES_VISION" in os.environ:
        sys.path.append(os.environ["JUDGES_VISION"])
        little_data()
