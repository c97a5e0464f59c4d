"""The steps of optimizers: their settings, and the number of steps made."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, update_wrapper
from inspect import signature
from operator import is_
from threading import get_ident
from typing import Any, ClassVar, ParamSpec, Protocol, TypedDict, TypeVar, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from aiodist.checkpoints.parts import bit_sums
from aiodist.communicator import Communicator
from aiodist.handles import Handle
from aiodist.nn.buckets import with_values
from aiodist.nn.hyperparameters import Lines, SettingsHash, described, optimizers_of
from aiodist.nn.per_rank import Shared
from aiodist.nn.step_log import Log
from aiodist.nn.tensor_parallel import total_over
from aiodist.types import Stateful, first_unknown

P = ParamSpec("P")
T = TypeVar("T")
Groups = Sequence[Mapping[str, Any]]
"""Parameter groups, as an optimizer of torch has them."""


class RateSchedule(Protocol):
    """One of torch's learning rate schedulers, or what steps as they do."""

    def step(self) -> object:
        """The optimizer has made a step."""


class Changes(TypedDict, total=False):
    """The settings that are given; None leaves a thing out."""

    clip_norm: float | None
    scaler: GradScaler | None
    scheduler: RateSchedule | Iterable[RateSchedule] | None
    autocast: torch.autocast | torch.dtype | None
    per_rank: Iterable[Tensor | nn.Module | str] | Tensor | nn.Module | str | None
    log: Log | None
    log_every: int


@dataclass(frozen=True)
class StepSettings:
    """How the steps of a net are made, the same on all ranks."""

    clip_norm: float | None = None
    """Maximum of the global norm of the reduced gradients, which are clipped after unscaling."""
    scaler: GradScaler | None = None
    """It scales losses, unscales the reduced gradients, and leaves out a step where one of them is not finite."""
    scheduler: Sequence[RateSchedule] = ()
    """They step after each step that was made."""
    autocast: torch.autocast | None = None
    """Forward runs under it, on the compute thread."""
    per_rank: Sequence[Tensor] = field(default=(), repr=False, compare=False)
    """Parameters that each rank keeps for itself: no net reduces them, and this rank alone clips and checks them."""
    log: Log | None = field(default=None, repr=False, compare=False)
    """Callback after steps, on rank 0."""
    log_every: int = field(default=1, repr=False, compare=False)
    """Number of steps between two calls of `log`."""
    divided: Mapping[nn.Parameter, Communicator] = field(default_factory=dict, repr=False, compare=False)
    """The parameters that are divided over ranks, with the communicator of these ranks."""

    def changed(self, shared: Shared, changes: Changes) -> StepSettings:
        """Return these settings with `changes`, of which a dtype of autocast is for the device of the parameters.

        Raises ValueError for a `clip_norm` not above 0, TypeError for what is none of what a setting takes.
        """
        given: dict[str, Any] = dict(changes)
        if "own" in given:
            raise TypeError("own=: use per_rank=")
        if unknown := given.keys() - Changes.__annotations__:
            raise TypeError(f"{', '.join(sorted(unknown))}: expected {', '.join(Changes.__annotations__)}")
        if isinstance(given.get("clip_norm"), bool):
            raise TypeError(f"clip_norm={given['clip_norm']}: expected a norm above 0, or None")
        clip_norm, scaler, autocast = (given.get(name) for name in ("clip_norm", "scaler", "autocast"))
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm}: expected a norm above 0, or None")
        if not isinstance(scaler, GradScaler | None):
            raise TypeError(f"scaler is {type(scaler).__name__}: expected a torch.amp.GradScaler, or None")
        if isinstance(autocast, torch.dtype):
            given["autocast"] = torch.autocast(next(shared.module.parameters()).device.type, dtype=autocast)
        elif not isinstance(autocast, torch.autocast | None):
            raise TypeError(f"autocast is {type(autocast).__name__}: expected a dtype, a torch.autocast, or None")
        if "per_rank" in given:
            given["per_rank"] = shared.own_parameters(given["per_rank"])
        if "scheduler" in given:
            given["scheduler"] = _schedulers(given["scheduler"])
        return replace(self, **given)

    def lines(self) -> Lines:
        """Return the settings that ranks compare, in words."""
        scaler = self.scaler
        how = "None"
        if scaler is not None and scaler.is_enabled():  # one that is disabled has no rates, and does nothing
            rates = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
            how = f"{type(scaler).__name__}{rates}"
        cast = self.autocast
        to = "None" if cast is None or not cast._enabled else f"{cast.device}, {cast.fast_dtype}"
        clip = "None" if self.clip_norm is None else repr(float(self.clip_norm))
        return [("clip_norm", clip), ("scaler", how), ("autocast", to)]

    @cached_property
    def described(self) -> str:
        return repr(self.lines())

    @property
    def whole(self) -> bool:
        """Updates need all gradients: no parameter may be updated before the last gradient is there."""
        return self.clip_norm is not None or self.scaler is not None

    @property
    def stateful(self) -> list[Stateful]:
        """The parts with state that continues over steps."""
        return [each for each in (self.scaler, *self.scheduler) if isinstance(each, Stateful)]

    def update(
        self, groups: Groups, step: Callable[[], object], total: Callable[[Tensor], Tensor] | None = None
    ) -> bool:
        """Call `step` once the gradients in the parameter `groups` are unscaled and clipped; return whether it ran.

        The scaler leaves it out, on all ranks alike, where a reduced gradient is not finite. Where ranks have different
        gradients, shards, `total` returns the sum over all ranks of a tensor; it is called as often on each. Ranks that
        share divided layers clip by the norm of the whole model, and leave out the same steps. What is `per_rank` is
        clipped by its own norm, and keeps its values where one of its gradients is not finite. Raises `RuntimeError`
        where the scaler finds no gradient at all, of which it could say whether it is finite.
        """
        if self.per_rank:
            mine = set(map(id, self.per_rank))
            own = [p for group in groups for p in group["params"] if id(p) in mine]
            groups = [{"params": [p for p in group["params"] if id(p) not in mine]} for group in groups]
            self._prepare_own(own)
        if self.scaler is None:
            if self.clip_norm is not None:
                self._clip(groups, total, self.clip_norm)
            step()
            return True
        if self.scaler.is_enabled() and total is None and not self.divided and not _reduced(groups):
            raise RuntimeError(
                "no parameter of the optimizer has a gradient, so the GradScaler has nothing to check: "
                "expected a loss that depends on one of them"
            )
        target = _Update(groups, step)
        self.scaler.unscale_(cast(Optimizer, target))  # as far as a scaler uses one
        try:
            if total is not None or self.divided:
                target = self._agreed(groups, step, total)
            if self.clip_norm is not None:
                self._clip(groups, total, self.clip_norm)
            self.scaler.step(cast(Optimizer, target))
        finally:
            self.scaler.update()
        return target.made

    def _agreed(self, groups: Groups, step: Callable[[], object], total: Callable[[Tensor], Tensor] | None) -> _Update:
        """Return an update that a scaler leaves out where a gradient of some rank is not finite."""
        assert self.scaler is not None
        bad = sum(not held.grad.isfinite().all() for _, held in _reduced(groups))
        flag = nn.Parameter(torch.zeros(1, device="cpu"))
        found = total_over(dict.fromkeys(self.divided.values()), torch.full((1,), float(bad), device="cpu"))
        found = found if total is None else total(found)
        flag.grad = torch.full_like(flag, torch.inf) if found > 0 else torch.zeros_like(flag)
        agreed = _Update([{"params": [flag]}], step)
        self.scaler.unscale_(cast(Optimizer, agreed))
        return agreed

    def _prepare_own(self, parameters: Sequence[Any]) -> None:
        """Unscale, check and clip the gradients of parameters that this rank keeps for itself."""
        held = [holder for _, holder in _reduced([{"params": parameters}])]
        if self.scaler is not None and self.scaler.is_enabled():
            for each in held:
                each.grad.div_(self.scaler.scale(torch.ones((), device=each.grad.device)))
            if not all(bool(each.grad.isfinite().all()) for each in held):
                for parameter in parameters:
                    parameter.grad = None
                return
        if self.clip_norm is not None and held:
            norm = nn.utils.get_total_norm([each.grad for each in held])
            nn.utils.clip_grads_with_norm_(held, self.clip_norm, norm)

    def _clip(self, groups: Groups, total: Callable[[Tensor], Tensor] | None, most: float) -> None:
        clipped = [(held, self.divided.get(p)) for p, held in _reduced(groups)]
        norm = nn.utils.get_total_norm(held.grad for held, coll in clipped if coll is None)
        square, dtype = norm.double().square(), norm.dtype
        for coll in dict.fromkeys(self.divided.values()):
            of_blocks = nn.utils.get_total_norm(held.grad for held, shared in clipped if shared is coll)
            dtype = torch.promote_types(dtype, of_blocks.dtype)
            square = square + total_over([coll], of_blocks.double().square().reshape(1))[0]
        if total is not None:
            square = total(square.reshape(1))[0]
        if total is not None or self.divided:
            norm = square.sqrt().to(dtype)
        nn.utils.clip_grads_with_norm_([held for held, _ in clipped], most, norm)

    def advance(self) -> None:
        """A step was made."""
        for scheduler in self.scheduler:
            scheduler.step()


def _reduced(groups: Groups) -> list[tuple[Any, Any]]:
    """Return the parameters that have a gradient, each with the owner of the gradient's values."""
    return [(p, with_values(p)) for group in groups for p in group["params"] if p.grad is not None]


def count_as_stepped(optimizer: Optimizer) -> None:
    """Mark `optimizer` as stepped for torch's schedulers, which otherwise warn, since its `step` was not called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


class _Update:
    """An update as a GradScaler sees it."""

    def __init__(self, groups: Groups, step: Callable[[], object]) -> None:
        self.param_groups = groups
        self.made = False
        self._step = step

    def step(self) -> None:
        self._step()
        self.made = True


def _schedulers(given: Any) -> tuple[RateSchedule, ...]:
    found = () if given is None else (given,) if hasattr(given, "step") else tuple(given)
    for scheduler in found:
        try:
            signature(scheduler.step).bind()
        except (AttributeError, TypeError) as error:
            raise TypeError(
                f"scheduler is {type(scheduler).__name__}: expected one whose step() needs nothing; one that looks at "
                "a metric (ReduceLROnPlateau) is to be stepped by you"
            ) from error
    return found


# --- how many steps: the parameters of two ranks are alike only after as many -----------------------------------------


class InFlight(Protocol):
    """A pass, as far as a step of an optimizer looks at it."""

    @property
    def usable(self) -> Handle[None]:
        """Handle that is done when all gradients may be used."""

    def withholds(self, parameter: int) -> bool:
        """Return True while the gradient of the parameter with this id is not reduced."""


class Steps:
    """Steps of one rank since the ranks were made alike, by any optimizer that has some of the `shared` parameters.

    An optimizer counts once between two backwards of the net, however often it steps there: one whose `step` calls that
    of its base class is seen once or twice, as it happens. What steps before the first backward has no gradients of
    the net. Two hooks of torch, one pair for all nets, note steps while there are nets; they cost a step of any
    optimizer 3 us. The first of them refuses a step that would use gradients that are not reduced.
    """

    _every: ClassVar[tuple[weakref.ref[Steps], ...]] = ()
    """Steps of the open nets; replaced and never changed, since the hook reads it in any thread."""
    _hooks: ClassVar[tuple[RemovableHandle, ...]] = ()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, shared: Shared) -> None:
        self.made = 0
        """Up to the last backward."""
        self.loaded = 0
        """Hash of the state that was loaded last on this rank alone; 0 if the ranks were made alike since."""
        self.mishap: BaseException | None = None
        """The last error that an optimizer raised on this rank, as far as is known."""
        self.thread: int | None = None
        """The thread that runs a backward of the net; None between two of them."""
        self.settings_hash = 0
        """A hash of the settings of the newest pass's step; 0 if they are not known."""
        self.declared: tuple[object, StepSettings | None] = None, None
        """The optimizer or driver of the next pass's step, and its settings."""
        self._compared: tuple[list[Optimizer], StepSettings | None] = [], None
        """The optimizers, and the other settings, that have this `settings_hash`."""
        self._hash = SettingsHash()
        self.partial = False
        """True in a backward of a list of closures that is not the last one, and leaves gradients on this rank."""
        self.current: InFlight | None = None
        """The newest pass; None after its end, unless it failed or there are devices."""
        self._module = shared.module
        self.names: Mapping[int, str] = {id(parameter): name for name, parameter in shared.named_parameters()}
        """Names of the parameters that the net reduces, by their ids."""
        self._own: frozenset[int] = frozenset()
        """Parameters that this rank keeps for itself, by their ids."""
        self._trusted: tuple[Optimizer, list[Tensor]] | None = None
        """The optimizer that was looked at last, with the parameters that it had."""
        self._since: dict[int, object] | None = None
        """Optimizers that stepped since the last backward, by their id; None before the first backward."""
        self._aside: int | None = None
        """The thread whose steps are counted elsewhere."""
        self._list(weakref.ref(self))

    # --- the hook -----------------------------------------------------------------------------------------------

    @classmethod
    def _list(cls, *new: weakref.ref[Steps], gone: Steps | None = None) -> None:
        with cls._lock:
            cls._every = (*(ref for ref in cls._every if ref() not in (None, gone)), *new)
            if cls._every and not cls._hooks:
                # Disabled: compiled code runs them as they are.
                before = register_optimizer_step_pre_hook(torch.compiler.disable(cls._about_to_step))
                cls._hooks = before, register_optimizer_step_post_hook(torch.compiler.disable(cls._stepped))
            elif not cls._every:
                for hook in cls._hooks:
                    hook.remove()
                cls._hooks = ()

    @classmethod
    def _about_to_step(cls, opt: Optimizer, *_: object) -> None:
        for ref in cls._every:
            if (steps := ref()) is None or steps._aside == get_ident():
                continue
            current = steps.current  # which the loop may set to None
            if steps.partial or (current is not None and not current.usable.done()):
                steps._check_reduced(opt, current)
            if steps._counts(opt):
                steps.check_known(opt, used=True)

    @classmethod
    def _stepped(cls, opt: Optimizer, *_: object) -> None:
        for ref in cls._every:
            if (steps := ref()) is not None and steps._counts(opt):
                steps.note(opt)

    def _counts(self, opt: Optimizer) -> bool:
        """Return True if a step of `opt` on this thread is one of this net."""
        if self._since is None or self._aside == get_ident():
            return False
        return any(not self.names.keys().isdisjoint(map(id, group["params"])) for group in opt.param_groups)

    def _check_reduced(self, opt: Optimizer, current: InFlight | None) -> None:
        """Raise RuntimeError if `opt` would step parameters whose gradients the pass `current` has not reduced."""
        within = self.partial or self.thread == get_ident()
        for parameter in (id(p) for group in opt.param_groups for p in group["params"]):
            if parameter in self.names and (within or (current is not None and current.withholds(parameter))):
                raise RuntimeError(
                    f"{type(opt).__name__}.step() was called while the gradient of parameter "
                    f"{self.names[parameter]!r} was not reduced yet, as by a hook within backward: it would use the "
                    "gradient of this rank alone, and ranks would come to differ. To update parameters while backward "
                    "runs, step as `async for parameter, gradient in net.backward_iter(loss)` yields them, or take "
                    "`aiodist.nn.PipelinedOptimizer`; else step after `await net.backward(loss)`"
                )

    # --- whose parameters an optimizer has ----------------------------------------------------------------------

    def keep_own(self, parameters: Iterable[Tensor]) -> None:
        """From now on this rank keeps these `parameters` for itself."""
        self._own, self._trusted = frozenset(map(id, parameters)), None

    def check_known(self, opt: Optimizer, *, used: bool = False) -> None:
        """Raise ValueError if `opt` has parameters to train that no net reduces, and that are not this rank's own.

        With `used` only those that have a gradient count. Costs 25 us for 1,000 parameters as long as they stay.
        """
        parameters = [p for group in opt.param_groups for p in group["params"]]
        if self._trusted is not None and self._trusted[0] is opt:
            trusted = self._trusted[1]
            if len(trusted) == len(parameters) and all(map(is_, trusted, parameters)):
                return
        here = [id(p) in self.names or id(p) in self._own for p in parameters]
        if all(here):
            self._trusted = opt, parameters
            return
        if not any(here):  # it has copies of all, or is not this net's
            return
        known = {id(p) for p in self._module.parameters()}  # the pass finds parameters that came later
        for other in (each for ref in self._every if (each := ref()) is not None):
            known.update(other.names, other._own)
        if (place := first_unknown(opt, known, used=used)) is not None:
            raise ValueError(
                f"{type(opt).__name__} has a parameter that no net reduces: {place}. Each rank would train it on its "
                "own gradients, and ranks would come to differ. Train it in one net with the others, "
                "`DataParallel.create(aiodist.engine.WithCriterion(network, criterion), coll)`, or say that each rank "
                "keeps its own, `net.configure(per_rank=head.parameters())`"
            )

    def release(self) -> None:
        self._list(gone=self)
        self.current = self._trusted = None

    @property
    def others_in_backward(self) -> bool:
        """True while another net's backward runs on this thread; on any, if this one is of autograd, for a device."""
        threads = {each.thread for ref in self._every if (each := ref()) not in (None, self)} - {None}
        return get_ident() in threads or (
            bool(threads) and all(thread.ident != get_ident() for thread in threading.enumerate())
        )

    # --- counting -----------------------------------------------------------------------------------------------

    def note(self, optimizer: object) -> None:
        """It has made a step, or all parts of one."""
        if self._since is not None:
            self._since[id(optimizer)] = optimizer

    def settle(self) -> None:
        """A backward begins: what was noted before it counts. The last one must be over."""
        noted, self._since = self._since or {}, {}
        self.made += len(noted)
        (driver, settings), self.declared = self.declared, (None, None)
        stepped = noted.values() if driver is None else (*noted.values(), driver)
        optimizers = list({id(opt): opt for each in stepped for opt in optimizers_of(each)}.values())
        self._compared = optimizers, settings
        text = "" if settings is None else settings.described
        self.settings_hash = self._hash.of(optimizers, text, self._own) if noted or settings is not None else 0

    def settings_lines(self) -> Lines:
        """Return the settings with the hash `settings_hash`, in words."""
        optimizers, settings = self._compared
        lines = [] if settings is None else settings.lines()
        for opt in optimizers:
            mine = (self.names.get(id(p)) for group in opt.param_groups for p in group["params"])
            first = next((name for name in mine if name is not None), None)
            of = f", the optimizer of {first!r}" if first is not None and len(optimizers) > 1 else ""
            lines += [(f"{name}{of}", value) for name, value in described(opt, self._own)]
        return lines

    @contextmanager
    def making(self) -> Iterator[None]:
        """An optimizer makes a step in this block; where it raises, this rank may be left behind."""
        try:
            yield
        except BaseException as error:
            self.mishap = error
            raise

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Steps that this thread makes in this block are parts of one that is noted when all are made."""
        self._aside = get_ident()
        try:
            yield
        finally:
            self._aside = None

    def blamed(self, fn: Callable[P, T]) -> Callable[P, T]:
        """Return `fn`, which may make a step."""

        def step(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.making():
                return fn(*args, **kwargs)

        return update_wrapper(step, fn)

    @property
    def total(self) -> int:
        """Steps made, those since the last backward too."""
        return self.made + len(self._since or ())

    @property
    def whole(self) -> int | None:
        """The same; None where an optimizer has raised, and the parameters may be those of no step."""
        return self.total if self.mishap is None else None

    def alike(self, made: int = 0, loaded: int = 0) -> None:
        """Note that the ranks have the same parameters, those after `made` steps, and of the state `loaded` if any."""
        self.made = made
        self.loaded = loaded
        self.mishap = None
        self._since = None

    @property
    def mark(self) -> int:
        """Number that is another one after other steps, or after a load of another state; exact as a float64."""
        return self.loaded << 32 | self.made

    def __str__(self) -> str:
        why = "" if self.mishap is None else f", since its optimizer raised {self.mishap!r}"
        state = f" after a load of the state {self.loaded:x}" if self.loaded else ""
        return f"{self.made} step{'s' * (self.made != 1)} made{state}{why}"


def check_only(opt: Optimizer, given: Container[int], what: str) -> None:
    """Raise ValueError if `opt` has parameters to train that are not `given`, by their ids: no net reduces them."""
    if (place := first_unknown(opt, given)) is not None:
        raise ValueError(
            f"{type(opt).__name__} has a parameter that is not of {what}: {place}. No net reduces it there, and ranks "
            "would come to differ. Train it in one net with the others (`aiodist.engine.WithCriterion` for a "
            "criterion), or if each rank keeps its own by an optimizer of its own"
        )


def hash_of(tensors: Sequence[Tensor]) -> int:
    """Return 20 bits that are others, but for one case in a million, where values differ; never 0."""
    return crc32(repr(bit_sums([t for t in tensors if t.numel()])).encode()) % ((1 << 20) - 1) + 1
