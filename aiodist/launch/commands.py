"""Command lines and environments of a `Job`, by pure functions.

A comment names the problem that each variable and option prevents.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

from aiodist.env import ALIASES
from aiodist.errors import BackendUnavailable, ConfigError
from aiodist.launch.hosts import Host, interface, ranks_beside
from aiodist.types import check_timeout


class Flavour(StrEnum):
    """Kind of an mpirun, which defines its options."""

    OPENMPI = "openmpi"
    MPICH = "mpich"
    OTHER = "other"


@dataclass(frozen=True)
class Mpi:
    """An mpirun and its library."""

    mpirun: str
    flavour: Flavour
    version: str
    library: str | None
    """File that mpi4py must load to join the job, or None if it is not installed with mpirun."""
    networks: tuple[str, ...] = ()
    """Network modules of an MPICH, in its order of preference."""


ENDS_ALL = "MPI ends every rank when one dies; say --mpi none"
"""Reason why a job under an mpirun cannot continue without one of its ranks."""


@dataclass(frozen=True)
class Job:
    """A job of `aiodist run`, with its options."""

    command: tuple[str, ...]
    """Arguments of the program, by default Python: `("train.py", "--lr", "0.1")` or `("-m", "package.module")`."""
    ranks: int
    """Number of ranks, with the servers."""
    mpi: str = "auto"
    """`auto`, `openmpi`, `mpich`, `none`, or the path of an mpirun."""
    mpi_args: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    """`NAME=VALUE`, or `NAME` for its value here."""
    log_dir: Path | None = None
    prefix: bool = True
    timeout: float | None = None
    kill_after: float = 3.0
    """Time between the request to stop and SIGKILL, in seconds."""
    finish_within: float = 5.0
    """Time for the others after a rank that never joined has ended with exit code 0, in seconds."""
    hosts: tuple[Host, ...] = ()
    """Hosts of the ranks, each with its number of ranks. Without hosts, all ranks run here."""
    rsh: str = ""
    """Command that runs a command on a host, as `RSH HOST COMMAND`. "" is ssh."""
    iface: str = ""
    """Network between hosts: an interface, or a network such as 10.0.0.0/24. "" is MPI's choice."""
    servers: int = 0
    """Number of ranks that only serve parameters, which are the last ones."""
    keep_going: bool = False
    """True lets the others continue if a rank fails."""
    elastic: tuple[int, int] | None = None
    """Fewest ranks with which the job continues after failures, and most ranks. None needs all ranks."""
    program: str = sys.executable
    """Program of each rank."""
    alias: str | None = None
    """Backend in whose place programs of torch.distributed get aiodist, or None."""
    debug: tuple[int, int] | None = None
    """Rank that waits for a debugger, with its port, or None."""

    def __post_init__(self) -> None:
        self._check_times()
        if self.servers < 0:
            raise ConfigError(f"--servers {self.servers}: expected a number of ranks, 0 for none")
        if self.ranks <= self.servers:
            who = f"workers beside {self.servers} servers" if self.servers else "ranks"
            raise ConfigError(f"{self.ranks - self.servers} {who}: expected at least 1")
        if not self.command and self.program == sys.executable:
            raise ConfigError("there is no script to run")
        if self.mpi == "none" and self.mpi_args:
            raise ConfigError(f"--mpi-arg {self.mpi_args[0]} needs an mpirun, but --mpi is none")
        self._check_debug()
        if self.hosts and sum(host.ranks or 0 for host in self.hosts) != self.ranks:
            raise ConfigError(f"{self.ranks} ranks, but {', '.join(map(str, self.hosts))}")
        if self.elastic is not None:
            self._check_elastic(*self.elastic)
        self._check_alias()
        if self.keep_going and self.mpi not in ("auto", "none"):
            raise ConfigError(f"--keep-going with --mpi {self.mpi}: {ENDS_ALL}")
        try:
            shlex.split(self.rsh)
        except ValueError as error:
            raise ConfigError(f"--rsh {self.rsh!r}: {error}") from error
        if not self.hosts and (self.rsh or self.iface):
            raise ConfigError(f"{'--rsh' if self.rsh else '--iface'} is for several hosts: say --hosts or --hostfile")

    def _check_times(self) -> None:
        for option in ("timeout", "kill_after", "finish_within"):
            seconds = getattr(self, option)
            try:
                check_timeout(seconds)
            except ValueError as error:
                raise ConfigError(f"--{option.replace('_', '-')} {seconds}: expected seconds, at least 0") from error

    def _check_alias(self) -> None:
        if self.alias not in (None, *ALIASES):
            raise ConfigError(f"--as {self.alias}: expected one of {', '.join(ALIASES)}")
        if self.alias and (self.elastic or self.servers):
            other = "--elastic" if self.elastic else "--servers"
            raise ConfigError(f"--as {self.alias} with {other}: all ranks are in one process group, from the start")

    def _check_elastic(self, least: int, most: int) -> None:
        what = f"--elastic {least}:{most}"
        if not 1 <= least <= self.ranks <= most:
            raise ConfigError(f"{what} with {self.ranks} ranks: expected 1 <= MIN <= ranks <= MAX")
        if self.keep_going:
            raise ConfigError(f"--keep-going with {what}, whose ranks continue when one fails: expected one of the two")
        if self.servers:
            raise ConfigError(f"--servers with {what}: ranks get new numbers, so that none can be set apart by them")

    def _check_debug(self) -> None:
        if self.debug is None:
            return
        rank, port = self.debug
        what = f"--debug {rank}:{port}"
        if rank >= self.ranks or not 0 < port < 1 << 16:
            raise ConfigError(f"{what} with {self.ranks} ranks: expected a rank below {self.ranks}, and a port")
        if not is_python(self.program) or (self.command[0].startswith("-") and self.command[0] not in ("-m", "-c")):
            raise ConfigError(f"{what}: expected a Python script, or -m and the name of a module")
        if find_spec("debugpy") is None:
            raise BackendUnavailable(f"{what} needs debugpy: pip install 'aiodist[debug]'")

    def command_of(self, rank: int) -> list[str]:
        """Return the command line of a rank."""
        if self.debug is None or self.debug[0] != rank:
            return [self.program, *self.command]
        waits = ("--listen", f"127.0.0.1:{self.debug[1]}", "--wait-for-client", "--configure-subProcess", "false")
        return [self.program, "-Xfrozen_modules=off", "-m", "debugpy", *waits, *self.command]


def is_python(program: str) -> bool:
    """Return True if the name of a program is that of a Python interpreter.

    >>> is_python("/usr/bin/python3.12"), is_python("pythonic")
    (True, False)
    """
    return _INTERPRETER.fullmatch(os.path.basename(program)) is not None


def debug_place(text: str) -> tuple[int, int] | None:
    """Return rank and port of --debug, or None for "". Raises `ConfigError` unless it is RANK or RANK:PORT.

    >>> debug_place("1"), debug_place("0:4000"), debug_place("")
    ((1, 5678), (0, 4000), None)
    """
    if not text:
        return None
    rank, colon, port = text.partition(":")
    if not rank.isdecimal() or not (port.isdecimal() if colon else True):
        raise ConfigError(f"--debug {text}: expected RANK or RANK:PORT")
    return int(rank), int(port) if colon else _DEBUG_PORT


def elastic_range(text: str) -> tuple[int, int] | None:
    """Return the range of --elastic, or None for "". Raises `ConfigError` unless it is MIN:MAX.

    >>> elastic_range("2:4"), elastic_range("")
    ((2, 4), None)
    """
    if not text:
        return None
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"--elastic {text}: expected MIN:MAX, how few and how many ranks there may be")
    return int(least), int(most)


def flavour(version_text: str) -> tuple[Flavour, str]:
    r"""Return flavour and version that the output of `mpirun --version` shows.

    >>> flavour("mpirun (Open MPI) 5.0.11\n")
    (<Flavour.OPENMPI: 'openmpi'>, '5.0.11')
    >>> flavour("HYDRA build details:\n    Version:     4.3.0\n")
    (<Flavour.MPICH: 'mpich'>, '4.3.0')
    """
    first = version_text.strip().splitlines()[0] if version_text.strip() else ""
    if "Open MPI" in first or "OpenRTE" in first:
        return Flavour.OPENMPI, first.rpartition(" ")[2]
    if first.startswith("HYDRA"):
        found = re.search(r"^\s*Version:(.*)", version_text, re.MULTILINE)
        return Flavour.MPICH, found[1].strip() if found else ""
    return Flavour.OTHER, first


def networks(version_text: str) -> tuple[str, ...]:
    r"""Return the network modules that the output of MPICH's `mpirun --version` names.

    >>> networks("HYDRA build details:\n    Configure options:   --with-device=ch4:ucx,ofi --with-pm=hydra")
    ('ucx', 'ofi')
    """
    _, found, rest = version_text.partition("--with-device=ch4:")
    return tuple(rest.split()[0].strip("'\"").split(",")) if found and rest.strip() else ()


_INTERPRETER = re.compile(r"(python|pypy)(3(\.\d+)?)?")
_SHM = "/dev/shm"
_DEBUG_PORT = 5678  # that of debugpy and VS Code
_NAME_HOSTS = ("host", "H", "machinefile", "default-hostfile")
"""How arguments of mpirun begin that give it hosts."""
_SEGMENTS_ELSEWHERE = (
    *("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_btl_vader_backing_directory"),  # the user's
    *("PRTE_MCA_prte_default_hostfile", "SLURM_JOB_ID", "PBS_NODEFILE", "LSB_HOSTS", "PE_HOSTFILE"),  # mpirun's hosts
)
_STALE = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDI_", "HYDRA_PROXY")
_STALE_EXACT = frozenset(
    f"AIODIST_{name}"
    for name in (
        *("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "SERVERS", "RENDEZVOUS", "TOKEN"),
        *("ELASTIC", "GENERATION", "PREVIOUS", "TERMINAL"),
    )
)
_OF_TORCHRUN = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "AIODIST_AS"),
    )
)
# In a rank; elsewhere the user has set them.
_OF_ITS_OPTIONS = frozenset(("AIODIST_TRACE", "AIODIST_STRAGGLERS", "AIODIST_DEBUG"))


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what another launcher wrote: started from inside a rank, this is a new job."""
    stale = _STALE_EXACT
    if "AIODIST_TOKEN" in environ:
        stale |= _OF_ITS_OPTIONS | (_OF_TORCHRUN if "AIODIST_AS" in environ else frozenset())
    return {name: value for name, value in environ.items() if not name.startswith(_STALE) and name not in stale}


def common_variables(
    environ: Mapping[str, str], rendezvous: str, token: str, servers: int = 0, elastic: tuple[int, int] | None = None
) -> dict[str, str]:
    """Return what every process of the job inherits: where its ranks meet, and the secret that lets them in."""
    return {
        **inherited(environ),
        **({"AIODIST_SERVERS": str(servers)} if servers else {}),
        **({"AIODIST_ELASTIC": f"{elastic[0]}:{elastic[1]}"} if elastic else {}),
        "AIODIST_RENDEZVOUS": rendezvous,
        "AIODIST_TOKEN": token,
        # Python buffers whole blocks when it writes to a pipe: lines would come late, or never from a killed rank.
        "PYTHONUNBUFFERED": environ.get("PYTHONUNBUFFERED", "1"),
    }


GUARD_NEEDS = {"AIODIST_TOKEN": "", "LD_LIBRARY_PATH": "", "PYTHONPATH": ""}
"""Variables that mpirun sends to other hosts, which must be set here. The guard gets the rest from the launcher."""
_OF_THIS_HOST = ("SLURM_", "SSH_", "XDG_", "DBUS_", "BASH_FUNC_")
_OF_THIS_HOST_EXACT = frozenset(
    (
        *("HOME", "USER", "LOGNAME", "MAIL", "SHELL", "HOST", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"),
        *("TMPDIR", "TMP", "TEMP", "TTY", "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY"),
    )
)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a rank on another host, without those of this host, login or terminal."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(_OF_THIS_HOST) and name not in _OF_THIS_HOST_EXACT
    }


def network_variables(mpi: Mpi | None, iface: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the libraries of ranks on several hosts need; what the user set stays."""
    variables: dict[str, str] = {}
    if mpi is not None and {"ucx", "ofi"} <= set(mpi.networks):
        # Over ucx a receive from any source never ends between hosts; over ofi's old sockets, which it prefers to tcp,
        # what one rank has sent may wait until that rank calls MPI again (both seen in MPICH 5.0.2).
        variables |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "^sockets"}
    if iface and "/" not in iface:  # an interface of a network may have another name on each host
        variables |= dict.fromkeys(("FI_TCP_IFACE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), iface)
    return {name: environ.get(name, value) for name, value in variables.items()}


def place_variables(rank: int, size: int, hosts: Sequence[Host] = ()) -> dict[str, str]:
    """Return the variables that tell a rank its place where no MPI does."""
    here = ranks_beside(hosts, rank) if hosts else range(size)
    return {
        "AIODIST_RANK": str(rank),
        "AIODIST_SIZE": str(size),
        "AIODIST_LOCAL_RANK": str(rank - here.start),
        "AIODIST_LOCAL_SIZE": str(len(here)),
    }


_STARTED_BY = Path(__file__).parents[1] / "alias" / "ranks"


def alias_variables(job: Job, rank: int, port: int, python_path: str) -> dict[str, str]:
    """Return the variables of a rank of `run --as`: those of torchrun, and the start-up of Python.

    Frameworks learn by torchrun's variables that they need not start the ranks. `port` is free on this host.
    """
    if job.alias is None:
        return {}
    place = place_variables(rank, job.ranks, job.hosts)
    hosts = [host for host in job.hosts if host.ranks] or [Host("127.0.0.1", job.ranks)]
    firsts = [0, *accumulate(host.ranks or 0 for host in hosts)]
    return {
        "AIODIST_AS": job.alias,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_STARTED_BY), python_path))),
        "RANK": place["AIODIST_RANK"],
        "WORLD_SIZE": place["AIODIST_SIZE"],
        "LOCAL_RANK": place["AIODIST_LOCAL_RANK"],
        "LOCAL_WORLD_SIZE": place["AIODIST_LOCAL_SIZE"],
        "GROUP_RANK": str(bisect(firsts, rank) - 1),
        "GROUP_WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].name.rpartition("@")[2],
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"aiodist-{os.getpid()}",
    }


def exported(exports: tuple[str, ...], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that `-x` names; raise `ConfigError` for one that has no value here."""
    variables = {}
    for export in exports:
        name, given, value = export.partition("=")
        if not name or (not given and name not in environ):
            raise ConfigError(f"-x {export}: expected NAME=VALUE, or the NAME of a variable that is set here")
        variables[name] = value if given else environ[name]
    return variables


def guard_command(address: str, cwd: Path) -> list[str]:
    """Return the command that starts one guard."""
    return [sys.executable, *own_path(cwd), "-m", "aiodist.launch.worker", address]


def own_path(cwd: Path) -> list[str]:
    """Return the options of Python for a program of aiodist.

    -P removes the working directory from the path: a file `select.py` there would replace the standard module. A
    checkout that is not installed needs the working directory.
    """
    return [] if cwd == Path(__file__).parents[2] else ["-P"]


def guard_script(guard: Sequence[str], cwd: Path) -> str:
    """Return the shell command that starts a guard on a host, with variables from standard input.

    Every user of a host can see its command lines. The guard reports a missing folder.
    """
    read = 'while IFS= read -r said && [ -n "$said" ]; do export "$said"; done'
    return f"cd {shlex.quote(str(cwd))} 2>/dev/null; {read}; exec {shlex.join(guard)}"


def check_mpi(job: Job, mpi: Mpi | None) -> None:
    """Raise an error if this MPI, or its absence, cannot run the job."""
    if mpi is None and job.mpi_args:
        raise ConfigError(f"--mpi-arg {job.mpi_args[0]}: no MPI was found, so there is no mpirun that could take it")
    if mpi is not None and job.keep_going:
        raise ConfigError(f"--keep-going with {mpi.mpirun}, which --mpi auto found: {ENDS_ALL}")
    if mpi is not None and job.elastic is not None:
        if mpi.flavour is not Flavour.OPENMPI or _before_prrte(mpi):
            raise BackendUnavailable(f"--elastic with {mpi.mpirun}: {ENDS_ALL}, or take Open MPI 5")
        if job.hosts:
            raise BackendUnavailable(f"--elastic with --hosts and {mpi.mpirun}: it starts no new ranks; say --mpi none")
    if not job.hosts or mpi is None:
        return
    if mpi.flavour is Flavour.OTHER:
        known = "Open MPI's and MPICH's options for hosts are known; give those of another with --mpi-arg"
        raise ConfigError(f"--hosts: {mpi.mpirun} is {mpi.version}: {known}, and -n")
    if mpi.flavour is Flavour.MPICH and len(shlex.split(job.rsh)) > 1:
        raise ConfigError(f"--rsh {job.rsh!r}: MPICH takes a program without arguments: put them into a script")


def mpirun_command(job: Job, mpi: Mpi, guard: list[str], session: str = "", segments: str = "") -> list[str]:
    """Return the command that starts a guard for each rank. Arguments of the user replace those of aiodist.

    `session` is a folder for mpirun's files on this host, and `segments` one for the ranks' shared memory. "" is their
    default.
    """
    given = {argument.lstrip("-").partition("=")[0] for argument in job.mpi_args}
    options: list[str] = []
    if mpi.flavour is Flavour.OPENMPI:
        if not given & {"map-by", "oversubscribe", "rankfile"}:
            # Else more ranks than cores are refused. By slot: one host after the other.
            options += ["--map-by", "slot:OVERSUBSCRIBE" if job.hosts else ":OVERSUBSCRIBE"]
        if not given & {"bind-to", "rankfile"}:
            options += ["--bind-to", "none"]  # else two ranks get one core each, for all of their threads
        if job.elastic is not None:  # else it ends all ranks when one dies
            options.append("--enable-recovery")
        if session and not _before_prrte(mpi) and not given & {"prte_local_tmpdir_base", "prte_tmpdir_base"}:
            # By default in /tmp under its process id: files of a killed mpirun stop the next one with that id.
            options += ["--prtemca", "prte_local_tmpdir_base", session]
        if segments and not given & {"btl_sm_backing_directory", "btl_vader_backing_directory"}:
            options += ["--mca", "btl_sm_backing_directory", segments]  # else a rank that is killed leaves them
        options += _openmpi_hosts(job, mpi) if job.hosts else []
    if mpi.flavour is Flavour.MPICH and job.hosts:
        options += _mpich_hosts(job)
    return [mpi.mpirun, "-n", str(job.ranks), *options, *job.mpi_args, *guard]


def segments_in(job: Job, mpi: Mpi, environ: Mapping[str, str]) -> str:
    """Return the parent folder on this host of the folder for the ranks' shared memory, or "" without such a folder."""
    # On other hosts there is no such folder.
    elsewhere = job.hosts or any(argument.lstrip("-").startswith(_NAME_HOSTS) for argument in job.mpi_args)
    own = elsewhere or any(name in environ for name in _SEGMENTS_ELSEWHERE)
    if mpi.flavour is not Flavour.OPENMPI or _before_prrte(mpi) or own or not os.access(_SHM, os.W_OK):
        return ""
    return _SHM


def folder(job: Job, cwd: Path) -> str | None:
    """Return where the ranks go, which on other hosts is not left to mpirun; None: where mpirun put them."""
    given = {argument.lstrip("-") for argument in job.mpi_args}
    return None if not job.hosts or given & {"wdir", "wd"} else str(cwd)


def _openmpi_hosts(job: Job, mpi: Mpi) -> list[str]:
    daemons, agent, network = (
        ("--mca", "plm_rsh_agent", "oob_tcp_if_include")
        if _before_prrte(mpi)
        else ("--prtemca", "plm_ssh_agent", "prte_if_include")
    )
    options = ["--host", ",".join(map(str, job.hosts))]
    if job.rsh:
        options += [daemons, agent, job.rsh]
    if job.iface:
        options += [daemons, network, job.iface, "--mca", "btl_tcp_if_include", job.iface]
    for name in GUARD_NEEDS:
        options += ["-x", name]
    return options


def _before_prrte(mpi: Mpi) -> bool:
    """Return True for an Open MPI whose mpirun has a runtime of its own, with other options."""
    return mpi.version.startswith(("2.", "3.", "4."))


def _mpich_hosts(job: Job) -> list[str]:
    options = ["-hosts", ",".join(map(str, job.hosts))]
    if job.rsh:
        options += ["-launcher", "ssh", "-launcher-exec", job.rsh]
    if job.iface:
        options += ["-iface", interface(job.iface)[0]]
    return [*options, "-genvlist", ",".join(GUARD_NEEDS)]


def mpirun_environment(mpi: Mpi, environ: Mapping[str, str], *, root: bool) -> dict[str, str]:
    """Return the variables that mpirun and its ranks need in addition to `environ`."""
    variables = {}
    if mpi.flavour is Flavour.OPENMPI:
        if root:  # else mpirun refuses to run
            variables["OMPI_ALLOW_RUN_AS_ROOT"] = variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        variables["OMPI_MCA_osc"] = environ.get("OMPI_MCA_osc", "^ucx")  # else a harmless error is printed
    if mpi.library is not None:
        # mpi4py loads the first library it finds: of another MPI, every rank would be alone in a world of one.
        variables["MPI4PY_LIBMPI"] = mpi.library
        folder = str(Path(mpi.library).parent)
        if not folder.startswith(("/usr/lib", "/lib")):
            rest = [part for part in environ.get("LD_LIBRARY_PATH", "").split(":") if part not in ("", folder)]
            variables["LD_LIBRARY_PATH"] = ":".join([folder, *rest])
    return variables
