"""Faults in real processes: do all processes end, do they report the reason, and can the training continue?

Trainings, job arrays and studies run as the scripts of users do, on 2 to 4 ranks and with every form of checkpoint.
They are started by Lightning, by torchrun, or on emulated hosts with one rank each. In each run one process is killed
or stopped, or the link of its host is cut. This happens at a random time between launch and exit, or at one of the
points that are listed in lightning_pipes.engine.watch.fault_points.

The end of a run is clean if all of the following hold:

- Every other process ends on its own and with an error, within ten seconds of the time at which it can detect the
  fault. A kill can be detected immediately, and a stop or a cut link after `heartbeat_timeout`. Before separate hosts
  are connected, detection takes `timeout`.
- The error messages name the rank, unless the rank had already announced its end.
- No process remains, and nothing is left in /dev/shm and TMPDIR.
- A stopped process ends within ten seconds after it is continued. If it runs on a separate host that was not connected
  yet, it may wait for `timeout` in addition.

The same job is then started again, unless torchrun has already restarted it. Its final weights must equal the weights
of an undisturbed run, bit for bit.

The table shows the number of clean ends by phase of the run and by kind of fault. The last lines show the number of
clean ends, the number of bit-equal results, and the slowest end.

    python benchmarks/faults.py [--quick] [--json] [--faults N] [--seed N] [--only N] [--at-once N] [--soon SECONDS]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from benchmarks.harness import namespaces
from benchmarks.harness.fault_job import Job, again
from benchmarks.harness.report import make_parser
from lightning_pipes.engine.watch.fault_points import Fault
from lightning_pipes.engine.watch.trust import SECRET_VARIABLE
from lightning_pipes.testing.ranks import (
    die_with_parent,
    end_all,
    find_processes,
    isolate_shared_memory,
    list_entries,
    rank_of,
    run_environment,
    wait_until,
    watch_ranks,
)
from lightning_pipes.testing.ranks import rank_environment as rank_environment

SCRIPT = str(Path(__file__).parent / "harness" / "fault_job.py")
SHM = Path("/dev/shm")
"""The folder of shared memory.

Semaphores (sem.*) in it are ignored, because Python leaves one behind if it is killed while it creates it.
"""
LAUNCHER = -1
"""A victim that is not a rank: the agent of torchrun."""
HEARTBEAT = 5.0
"""Seconds of `heartbeat_timeout` in runs with a fault that only heartbeats or timeouts can detect.

Other runs use a long timeout instead, because their detection must not depend on heartbeats.
"""
LONG = 240.0
"""Seconds within which an undisturbed run ends even on the slowest machine."""
PHASES = ("launch", "connecting", "training", "saving", "hand-over", "end")
QUICK = 8
ACTS = ("kill", "stop", "cut")
CAUSES = (
    r"has ended|was ended|declared dead|been stopped|not answered|did not come|not come|can't be reached|"
    r"its process gone"
)


@dataclass(frozen=True)
class Case:
    """A fault, and the run in which it happens.

    Attributes:
        number: the number of the fault in the sequence of a seed.
        kind: the kind of the job: "fit", "array" or "study".
        form: the form of its checkpoints, as in `Job`.
        launcher: "lightning", "torchrun", or "hosts" if each rank has a separate host.
        ranks: the number of ranks.
        victim: a rank, or `LAUNCHER`.
        act: the kind of fault, one of `ACTS`.
        phase: the phase of the run, one of `PHASES`.
        point: the named point at which the fault happens, or an empty string if it happens at a time after a mark.
        nth: which passing of the point counts, starting with 1.
        delay: seconds from the passing of the point to the fault.
        after: the mark of the job after which the fault happens, or an empty string.
        part: the time of the fault after this mark, as a fraction of the time to the next mark.
        restarts: the number of restarts that torchrun is allowed.
    """

    number: int
    kind: str
    form: str
    launcher: str
    ranks: int
    victim: int
    act: str
    phase: str
    point: str = ""
    nth: int = 1
    delay: float = 0.0
    after: str = ""
    part: float = 0.0
    restarts: int = 0

    def __str__(self) -> str:
        who = "torchrun" if self.victim == LAUNCHER else f"rank {self.victim}"
        where = f"{self.part:.0%} of the way after {self.after!r}" if self.after else f"{self.point} #{self.nth}"
        if self.delay:
            where += f" + {1000 * self.delay:.0f} ms"
        again = ", restarted" if self.restarts else ""
        return f"{self.act} {who} of {self.ranks}, {self.launcher}, {self.kind}, {self.form}, {where}{again}"

    @property
    def length(self) -> float:
        """The seconds from the mark to the next mark, on a machine that is not busy."""
        launches = self.launcher == "lightning" and self.victim == 0
        seconds = {"born": 6.0, "imported": 6.0 if launches else 0.5, "training": 0.6, "trained": 0.5}[self.after]
        return seconds * 3 if self.after == "training" and self.kind != "fit" else seconds

    @property
    def early(self) -> bool:
        """Whether the fault may happen before all ranks are connected."""
        first = self.nth == 1 and self.point in ("watch.made", "process_group.made", "sibling.turn", "trial")
        return self.phase == "launch" or self.after == "imported" or first

    @property
    def over(self) -> bool:
        """Whether the other ranks no longer wait for the victim, because it has announced its end."""
        return self.point in ("watch.closed", "exit")

    @property
    def told(self) -> bool:
        """Whether other processes can detect the fault immediately, by broken connections or through the launcher."""
        return self.act == "kill" and not (self.early and self.launcher == "hosts")


@dataclass(frozen=True)
class Result:
    """The outcome of a fault.

    Attributes:
        case: the fault.
        happened: whether the process still existed at the time of the fault.
        wrong: descriptions of everything that was not clean. Empty if the end was clean.
        bit_equal: whether the weights equal the weights of an undisturbed run after the job was continued.
        seconds: the time from when the other processes could detect the fault until the last one ended.
        log: the output of the ranks.
    """

    case: Case
    happened: bool
    wrong: tuple[str, ...] = ()
    bit_equal: bool = False
    seconds: float = 0.0
    log: str = ""


# ---- choosing faults


def cases(seed: int, hosts: bool) -> Iterator[Case]:
    """Yield all faults. Number n of a seed is always the same, however many faults are run."""
    number = 0
    while True:
        yield case(random.Random(f"{seed}/{number}"), number, hosts)
        number += 1


def few(every: Iterator[Case]) -> list[Case]:
    """Return one fault of every phase and two more faults that are not kills, all on two ranks."""
    phases, others = dict[str, Case](), list[Case]()
    while len(phases) < len(PHASES) or len(others) < QUICK - len(PHASES):
        each = next(every)
        if each.ranks > 2 or (each.early and not each.told):  # these take too long
            continue
        if each.phase not in phases:
            phases[each.phase] = each
        elif each.act != "kill":
            others.append(each)
    return [*phases.values(), *others[: QUICK - len(PHASES)]]


def case(draw: random.Random, number: int, hosts: bool) -> Case:
    """Return a random fault.

    Args:
        draw: the source of random numbers.
        number: the number of the fault, which determines its phase.
        hosts: whether emulated hosts are available.
    """
    phase = PHASES[number % len(PHASES)]
    act = draw.choices(ACTS, (60, 20, 20 if hosts else 0))[0]
    kind = draw.choice(("array", "study") if phase == "hand-over" else ("fit", "fit", "array", "study"))
    launchers = {"lightning": 5, "torchrun": 3, "hosts": 2 if hosts and kind != "study" else 0}
    if act == "cut":
        launchers, kind = {"hosts": 1}, draw.choice(("array",) if phase == "hand-over" else ("fit", "array"))
    launcher = draw.choices([*launchers], [*launchers.values()])[0]
    ranks = draw.choices((2, 3, 4), (6, 3, 1))[0]
    victims = [*range(ranks)]
    form = draw.choice(("full", "sharded", "async", "sharded async"))
    of_rank_zero = ("sharded" not in form and phase == "saving") or (kind == "study" and draw.random() < 0.3)
    victim = 0 if of_rank_zero else draw.choice(victims)
    after = "" if phase in ("saving", "hand-over") or draw.random() < 0.6 else instants(phase)
    if launcher == "torchrun" and after and draw.random() < 0.6:
        victim = LAUNCHER
    if act == "stop" and kind == "study" and phase in ("launch", "connecting"):
        act = "kill"  # this combination is covered by tests/faults/test_stopped_early.py
    restarts = int(launcher == "torchrun" and act == "kill" and victim != LAUNCHER and draw.random() < 0.4)
    made = Case(number, kind, form, launcher, ranks, victim, act, phase, after=after, restarts=restarts)
    if after:
        return replace(made, part=draw.random())
    point, most = draw.choice(places(made))
    delay = draw.choice((0.0, draw.uniform(0, 0.03))) if point in ("new_group", "transport") and act != "cut" else 0.0
    return replace(made, point=point, nth=draw.randint(1, most), delay=delay)


def instants(phase: str) -> str:
    """Return the mark that begins a phase."""
    return {"launch": "born", "connecting": "imported", "training": "training", "end": "trained"}[phase]


def places(case: Case) -> Sequence[tuple[str, int]]:
    """Return the named points of a phase that the victim reaches, and how often it reaches them at least."""
    torchrun, array, sharded = case.launcher == "torchrun", case.kind != "fit", "sharded" in case.form
    first, last = case.victim == case.ranks - 1, case.victim == 0
    trainings = 4 if array else 1
    found = {
        "launch": [("process_group", 1)],
        "connecting": [
            ("process_group.made", 1),
            ("watch.made", 1),
            ("new_group", 2 if array else 1),
            ("new_group", 1),
            ("new_group.made", 1),
            ("collective", 8),
            ("transport", 1),
            ("transport.told", 1),
            ("transport.made", 1),
        ],
        "training": [("F", 60), ("B", 60), ("STEP", 20), ("collective", 60)],
        "saving": [("checkpoint", 4), ("checkpoint.write", 4)],
        "hand-over": [("sibling.turn", 60), ("sibling.meet", 4), ("sibling.pause", 60), ("sibling.ended", 4)],
        "end": [("teardown", trainings), ("teardown.gathered", trainings), ("teardown.closed", trainings)],
    }[case.phase]
    more: list[tuple[str, int]] = []
    if case.phase == "launch" and torchrun:
        more = [("rendezvous", 1), ("rendezvous.answered", case.ranks - 1) if last else ("rendezvous.asked", 1)]
    if case.phase == "training":
        more = [] if first else [("RF", 60), ("SB", 60)]
        more += [] if last else [("SF", 60), ("RB", 60)]
    if case.phase == "saving":
        more = [("checkpoint.part", 4)] if sharded else []
        more += [("checkpoint.put", 4)] if last else []
    if case.phase == "hand-over" and case.kind == "study":
        more = [("trial", 4)] + ([("trial.tell", 4)] if last else [])
    if case.phase == "end":
        more = [("control.close", 1), ("watch.close", 1), ("watch.closed", 1), ("exit", 1)]
        more += [("array.gather", 1), ("array.close", 1)] if array else []
    return [*found, *more]


# ---- running one fault


class Run:
    """A run of a job in separate interpreters, and the fault that is injected into one of them.

    Args:
        case: the fault.
        folder: an empty folder for the job and for temporary files.
        soon: seconds within which processes have to end.
    """

    def __init__(self, case: Case, folder: Path, soon: float) -> None:
        self.case = case
        self.soon = soon
        self.timeout = 1800.0 if case.told or not case.early else 3 * soon
        heartbeat = 120.0 if case.told else HEARTBEAT
        self.job = Job(str(folder / "job"), case.kind, case.form, case.ranks, heartbeat, self.timeout)
        self.token = secrets.token_hex(16)
        self.temporary = folder / "tmp"
        self.file = folder / "fault"
        self.hosts: namespaces.Hosts | None = None
        self.roots: list[subprocess.Popen[str]] = []
        for each in (Path(self.job.folder), self.temporary):
            each.mkdir(parents=True)

    @contextmanager
    def started(self) -> Iterator[None]:
        """Start the job. All of its processes are ended when the context closes."""
        with ExitStack() as stack:
            stack.callback(end_all, self.token)
            env = {**run_environment(self.token, self.temporary), **self.job.environment()}
            if self.case.point:
                act = "wait" if self.case.act == "cut" else self.case.act
                fault = Fault(self.case.victim, self.case.point, str(self.file), self.case.nth, act, self.case.delay)
                env |= fault.to_environment()
            said = stack.enter_context(open(Path(self.job.folder, "launcher.said"), "w"))
            if self.case.launcher == "hosts":
                self.hosts = stack.enter_context(namespaces.Hosts(self.case.ranks))
                for rank in range(self.case.ranks):
                    more = rank_environment(rank, self.case.ranks, namespaces.host_address(0), namespaces.PORT)
                    more |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": str(self.case.ranks)}
                    more |= {"GROUP_RANK": str(rank), SECRET_VARIABLE: self.token}
                    command = [sys.executable, SCRIPT]
                    self.roots.append(self.hosts.start(rank, command, {**env, **more}, stdout=said, stderr=said))
            else:
                command = [sys.executable, SCRIPT]
                if self.case.launcher == "torchrun":
                    options = ["--standalone", f"--nproc-per-node={self.case.ranks}"]
                    options += [f"--max-restarts={self.case.restarts}", f"--log-dir={self.job.folder}"]
                    command = [sys.executable, "-m", "torch.distributed.run", *options, SCRIPT]
                self.roots.append(
                    subprocess.Popen(command, env=env, stdout=said, stderr=said, text=True, preexec_fn=die_with_parent)
                )
            yield

    # ---- injecting the fault

    def strike(self) -> float | None:
        """Inject the fault, and return its time, or None if the process had already ended."""
        if self.case.after:
            place = self.job.mark(self.case.after, max(self.case.victim, 0))
        else:
            place = self.file
        wait_until(lambda: place.exists() or self.ended(), LONG)
        if not place.exists():
            return None
        if self.case.point:
            at = float(self.file.read_text())
            if self.case.act == "cut":
                self.cut()
                at = time.monotonic()
                self.file.unlink()
            return at
        time.sleep(self.case.part * self.case.length)
        pid = self.pid()
        if pid is None:
            return None
        at = time.monotonic()
        if self.case.act == "cut":
            self.cut()
        else:
            try:
                os.kill(pid, signal.SIGKILL if self.case.act == "kill" else signal.SIGSTOP)
            except ProcessLookupError:
                return None
        return at

    def cut(self) -> None:
        """Cut the link of the victim's host."""
        assert self.hosts is not None
        self.hosts.cut(self.case.victim)

    def pid(self) -> int | None:
        """Return the process ID of the victim, or None if it has ended."""
        if self.case.victim == LAUNCHER:
            return self.roots[0].pid if self.roots[0].poll() is None else None
        for pid, env in find_processes(self.token).items():
            is_rank = self.case.launcher != "torchrun" or pid != self.roots[0].pid
            if is_rank and rank_of(env) == self.case.victim:
                return pid
        return None

    # ---- checking the end of the processes

    def ended(self) -> bool:
        """Return whether all processes of the run have ended."""
        return all(root.poll() is not None for root in self.roots) and not find_processes(self.token)

    def others(self) -> set[int]:
        """Return the processes that have to end by themselves.

        A stopped process is not one of them. Neither is the process that started it and waits for it: the agent of
        torchrun, or rank 0 with Lightning after its own work is complete.
        """
        for root in self.roots:
            root.poll()
        found = {*find_processes(self.token)}
        if self.case.act == "stop":
            victim = self.pid() or 0
            waits = self.case.launcher == "torchrun" or (self.case.launcher == "lightning" and self.complete)
            found -= {victim, self.roots[0].pid} if waits else {victim}
        return found

    def all_imported(self) -> float:
        """Return the time at which the last process had imported its modules.

        Only then can it monitor the other processes.
        """
        marks = [self.job.mark("imported", rank) for rank in range(self.case.ranks) if rank != self.case.victim]
        times = [mark.stat().st_mtime for mark in marks if mark.exists()]
        latest = max(times, default=0.0) if len(times) == len(marks) else time.time()
        return time.monotonic() - (time.time() - latest)

    def watch(self, at: float) -> tuple[list[str], float]:
        """Wait until the processes have ended.

        Args:
            at: the time of the fault.

        Returns:
            Descriptions of everything that was not clean, and the seconds until the last process ended.
        """
        wrong = []
        later = 0.0 if self.case.told else self.timeout if self.case.early else HEARTBEAT
        known = at + later
        alone = not self.others()
        while left := self.others():
            known = max(known, self.all_imported() + later)
            if time.monotonic() > min(known + (LONG if self.case.restarts else self.soon), at + LONG):
                there = ", ".join(
                    f"rank {rank_of(env)}" for pid, env in find_processes(self.token).items() if pid in left
                )
                wrong.append(f"{there} still running {self.soon:.0f} s after the fault could be detected")
                break
            time.sleep(0.2)
        seconds = max(0.0, time.monotonic() - known)
        if not left and self.case.act == "stop":
            pid = self.pid()
            if pid is not None:
                os.kill(pid, signal.SIGCONT)
            # A rank on a separate host may not have been connected yet. It then waits for the others for `timeout`.
            patience = self.soon + (self.timeout if self.case.early and self.case.launcher == "hosts" else 0.0)
            if not wait_until(self.ended, LONG if alone else patience):
                wrong.append(f"the stopped process is still running {patience:.0f} s after it was continued")
        return wrong, 0.0 if self.case.restarts else seconds

    @property
    def complete(self) -> bool:
        """Whether all trainings were completed in spite of the fault."""
        return len(self.job.weights()) == self.job.trainings

    def check(self) -> list[str]:
        """Return descriptions of everything that was not clean, after all processes have ended."""
        wrong = []
        for number, root in enumerate(self.roots):
            root.wait(self.soon)  # the process has already ended
            victim = self.case.victim == (number if self.case.launcher == "hosts" else LAUNCHER)
            victim |= self.case.launcher == "lightning" and self.case.victim == 0
            if not victim and not self.complete and root.returncode == 0:
                wrong.append("the exit status is 0, but the job is not complete")
        if self.case.restarts and self.roots[0].returncode != 0:
            wrong.append(f"torchrun did not complete the job: exit status {self.roots[0].returncode}")
        texts = {path.stem: path.read_text() for path in Path(self.job.folder).glob("*.said")}
        texts.pop(f"rank{self.case.victim}", None)
        aborted = [name for name, text in texts.items() if "Fatal Python error" in text or "terminate called" in text]
        if aborted:
            wrong.append(f"{', '.join(aborted)} aborted")
        waited = not self.complete and not self.case.over
        if waited and any(texts.values()) and not self.named("\n".join(texts.values())):
            wrong.append("no message names the rank")
        if left := list_entries(self.temporary):
            wrong.append(f"left in TMPDIR: {', '.join(sorted(left))}")
        return wrong

    def named(self, text: str) -> bool:
        """Return whether the output `text` names the victim."""
        rank = self.case.victim
        patterns = [rf"(?<!\[)rank [\d, ]*\b{rank}\b.*({CAUSES})", rf"({CAUSES}).*rank [\d, ]*\b{rank}\b"]
        if rank == LAUNCHER:
            patterns = ["the launcher, which hosts the store", "the launcher has (ended|not answered)"]
        if rank == LAUNCHER or (rank == 0 and self.case.launcher == "lightning"):
            patterns.append("which has started this one, has ended")
        if self.case.launcher == "torchrun":  # torchrun names it and ends the other ranks first
            patterns.append(rf"Root Cause.*\n(.*\n)*? *rank +: {rank} \(")
        return any(re.search(pattern, text) for pattern in patterns)

    def log(self) -> str:
        """Return the end of the output of each process."""
        paths = sorted(Path(self.job.folder).glob("*.said"))
        return "\n".join(f"---- {path.stem}\n{path.read_text()[-6000:]}" for path in paths)


def one(case: Case, soon: float, wanted: Mapping[str, str]) -> Result:
    """Inject a fault and continue the job afterwards. If the process ends too early, try an earlier time.

    Args:
        case: the fault.
        soon: seconds within which processes have to end.
        wanted: the digests of the weights of an undisturbed run.
    """
    for _ in range(4):
        found = try_one(case, soon, wanted)
        if found.happened:
            return found
        case = replace(case, nth=max(1, case.nth // 3), part=case.part / 2)
    return found


def try_one(case: Case, soon: float, wanted: Mapping[str, str]) -> Result:
    """Inject a fault once and continue the job afterwards, with the arguments of `one`."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        before = list_entries(SHM)
        run = Run(case, folder, soon)
        wrong: list[str] = []
        with run.started():
            at = run.strike()
            if at is None:
                return Result(case, False, log=run.log())
            wrong, seconds = run.watch(at)
            if not wrong:
                wrong += run.check()
        if left := {path for path in list_entries(SHM) - before if not Path(path).name.startswith("sem.")}:
            wrong.append(f"left in /dev/shm: {', '.join(sorted(left))}")
        log = run.log()
        equal = run.job.weights() == wanted if case.restarts else False
        if not case.restarts:
            for path in Path(run.job.folder).glob("*.weights"):
                if case.kind != "study":  # a study does not repeat trials that have ended
                    path.unlink()
            outcomes = watch_ranks(again, case.ranks, replace(run.job, heartbeat=120.0, timeout=1800.0), timeout=LONG)
            errors = [f"rank {o.rank} can't continue the job: {o.error}" for o in outcomes if o.error]
            equal = run.job.weights() == wanted
            if errors:
                log += "\n".join(["", *errors])
        if left_over := [str(path) for path in Path(run.job.folder).rglob("*.saving")]:
            wrong.append(f"an incomplete checkpoint is left: {', '.join(left_over)}")
        return Result(case, True, tuple(wrong), equal, seconds, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- running all faults


def undisturbed(kind: str, ranks: int) -> dict[str, str]:
    """Return the digests of the weights of a job without faults."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, kind, "full", ranks, 120.0, 1800.0)
        outcomes = watch_ranks(again, ranks, job, timeout=LONG)
        if errors := [o.error for o in outcomes if o.error]:
            raise SystemExit("\n".join(errors))
        return job.weights()


def table(results: Sequence[Result]) -> str:
    """Return a table with the number of clean ends by phase and by kind of fault."""
    rows = ["| phase | " + " | ".join(ACTS) + " |", "| --- |" + " --- |" * len(ACTS)]
    for phase in PHASES:
        cells = []
        for act in ACTS:
            these = [r for r in results if r.case.phase == phase and r.case.act == act]
            cells.append(f"{sum(not r.wrong for r in these)} of {len(these)}" if these else "")
        rows.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def say(result: Result, total: int, done: int) -> None:
    """Print the outcome of a fault on one line."""
    words = "clean" if not result.wrong else f"NOT CLEAN ({'; '.join(result.wrong)})"
    words += f" after {result.seconds:.1f} s, {'bit-equal' if result.bit_equal else 'NOT EQUAL'}"
    if not result.happened:
        words = "did not happen"
    print(f"{done:3}/{total} number {result.case.number:3}: {result.case}: {words}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, "only 8 faults")
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="run only faults with these numbers, and print all output")
    parser.add_argument("--at-once", type=int, default=2, help="the number of faults at a time")
    parser.add_argument("--soon", type=float, default=10.0, help="seconds within which all processes have to end")
    options = parser.parse_args()
    began = time.monotonic()
    hosts = not namespaces.unavailable_reason()
    if not hosts:
        print(f"without separate hosts and cut links: {namespaces.unavailable_reason()}")
    every = cases(options.seed, hosts)
    if options.quick:
        chosen = few(every)
    elif options.only:
        chosen = [*islice(every, max(options.only) + 1)]
        chosen = [chosen[number] for number in options.only]
    else:
        chosen = [*islice(every, options.faults)]
    results: list[Result] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.at_once, context, initializer=isolate_shared_memory) as pool:
        plain = {(c.kind, c.ranks) for c in chosen}
        weights = {each: pool.submit(undisturbed, *each) for each in sorted(plain)}
        wanted = {each: future.result() for each, future in weights.items()}
        futures = [pool.submit(one, c, options.soon, wanted[c.kind, c.ranks]) for c in chosen]
        for future in as_completed(futures):
            results.append(future.result())
            say(results[-1], len(chosen), len(results))
            if options.only or results[-1].wrong or not results[-1].bit_equal:
                print(results[-1].log, file=sys.stderr, flush=True)
    done = [r for r in results if r.happened]
    print()
    print(table(done))
    clean, equal = sum(not r.wrong for r in done), sum(r.bit_equal for r in done)
    slowest = max((r.seconds for r in done), default=0.0)
    print(f"\n{len(done)} faults: {clean} clean ends, {equal} bit-equal resumes, the slowest end after {slowest:.1f} s")
    print(f"{time.monotonic() - began:.0f} s in total")
    if options.json:
        headline = {"faults": len(done), "clean_ends": clean, "bit_equal_resumes": equal}
        print(json.dumps({**headline, "slowest_end_s": round(slowest, 2)}))


if __name__ == "__main__":
    main()
