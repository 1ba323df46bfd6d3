"""Faults in real processes: does everything end, does it say why, and does training go on as if nothing had happened?

Trainings, job arrays and studies run as a user's script does, started by Lightning, by torchrun, or on hosts of their
own, on 2 to 4 ranks, with every form of checkpoint. One process is killed or stopped, or its host's link is cut, at a
random instant from launch to exit, or at one of the places that lightning_pipes.engine.watch.fault_points names.

An end is clean if every other process has ended within ten seconds of when it can know (of a kill at once, of a stop
or a cut link after heartbeat_timeout, before hosts are connected after timeout), by itself and with an error, if
the rank is named in what they say, unless it had told them that it ends, if no process and nothing in /dev/shm and
TMPDIR is left, and if who was stopped ends within ten seconds of being continued (on a host of its own that was not
connected yet, of when it has waited for `timeout`, too). Then the same is started again; its weights in the end have to
equal those of an undisturbed run, bit for bit.

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
from lightning_pipes.engine.watch.trust import SECRET
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
"""Not of ours are semaphores (sem.*), which Python leaves if it is killed while it makes one."""
LAUNCHER = -1
"""A victim that is no rank: torchrun's agent."""
HEARTBEAT = 5.0
"""Seconds of `heartbeat_timeout` where something is stopped or cut; where something is killed nobody may need it."""
LONG = 240.0
"""Seconds in which a run that nothing happens to is through on the slowest machine."""
PHASES = ("launch", "connecting", "training", "saving", "hand-over", "end")
QUICK = 8
ACTS = ("kill", "stop", "cut")
CAUSES = (
    r"has ended|was ended|declared dead|been stopped|not answered|did not come|not come|can't be reached|"
    r"its process gone"
)


@dataclass(frozen=True)
class Case:
    """A fault, and what it happens to.

    Attributes:
        kind: of the job: "fit", "array" or "study".
        form: of its checkpoints.
        launcher: "lightning", "torchrun", or "hosts" where each rank has a host of its own.
        victim: a rank, or `LAUNCHER`.
        act: of `ACTS`.
        phase: of `PHASES`.
        point: the place; empty for an instant.
        nth: at which passing.
        delay: seconds from the passing to the fault.
        after: a mark of the job, which the instant lies behind.
        part: where it lies, as a part of the time to the next mark.
        restarts: torchrun's.
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
        """Seconds from the mark of an instant to the next one, on a machine that is not busy."""
        launches = self.launcher == "lightning" and self.victim == 0
        seconds = {"born": 6.0, "imported": 6.0 if launches else 0.5, "training": 0.6, "trained": 0.5}[self.after]
        return seconds * 3 if self.after == "training" and self.kind != "fit" else seconds

    @property
    def early(self) -> bool:
        """Whether ranks may not be connected yet."""
        first = self.nth == 1 and self.point in ("watch.made", "process_group.made", "sibling.turn", "trial")
        return self.phase == "launch" or self.after == "imported" or first

    @property
    def over(self) -> bool:
        """Whether nobody waits for the victim any more: it has told the others that it ends."""
        return self.point in ("watch.closed", "exit")

    @property
    def told(self) -> bool:
        """Whether others can know of it at once: of a kill by connections that break, or by a launcher."""
        return self.act == "kill" and not (self.early and self.launcher == "hosts")


@dataclass(frozen=True)
class Result:
    """What a fault led to.

    Attributes:
        happened: whether the process was there at that instant.
        wrong: what was not clean; nothing if all was.
        bit_equal: whether the weights are those of an undisturbed run, after going on.
        seconds: from when the others can know to the end of the last one.
        log: what the ranks have said.
    """

    case: Case
    happened: bool
    wrong: tuple[str, ...] = ()
    bit_equal: bool = False
    seconds: float = 0.0
    log: str = ""


# ---- which faults


def cases(seed: int, hosts: bool) -> Iterator[Case]:
    """All of them; number n is the same for one seed, however many are run."""
    number = 0
    while True:
        yield case(random.Random(f"{seed}/{number}"), number, hosts)
        number += 1


def few(every: Iterator[Case]) -> list[Case]:
    """One fault of every phase, and two more that are no kills, all on two ranks."""
    phases, others = dict[str, Case](), list[Case]()
    while len(phases) < len(PHASES) or len(others) < QUICK - len(PHASES):
        each = next(every)
        if each.ranks > 2 or (each.early and not each.told):  # those take their time
            continue
        if each.phase not in phases:
            phases[each.phase] = each
        elif each.act != "kill":
            others.append(each)
    return [*phases.values(), *others[: QUICK - len(PHASES)]]


def case(draw: random.Random, number: int, hosts: bool) -> Case:
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
        act = "kill"  # tests/faults/test_stopped_early.py has those
    restarts = int(launcher == "torchrun" and act == "kill" and victim != LAUNCHER and draw.random() < 0.4)
    made = Case(number, kind, form, launcher, ranks, victim, act, phase, after=after, restarts=restarts)
    if after:
        return replace(made, part=draw.random())
    point, most = draw.choice(places(made))
    delay = draw.choice((0.0, draw.uniform(0, 0.03))) if point in ("new_group", "transport") and act != "cut" else 0.0
    return replace(made, point=point, nth=draw.randint(1, most), delay=delay)


def instants(phase: str) -> str:
    """The mark after which the instants of a phase lie."""
    return {"launch": "born", "connecting": "imported", "training": "training", "end": "trained"}[phase]


def places(case: Case) -> Sequence[tuple[str, int]]:
    """The named places of a phase that the victim comes to, and how often at least."""
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


# ---- one of them


class Run:
    """A job whose ranks are interpreters of their own, and the fault that happens to one of them."""

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
                    more |= {"GROUP_RANK": str(rank), SECRET: self.token}
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

    # ---- the fault

    def strike(self) -> float | None:
        """When the fault happened; None if the process had ended before."""
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
        assert self.hosts is not None
        self.hosts.cut(self.case.victim)

    def pid(self) -> int | None:
        """The victim's process, while it is there."""
        if self.case.victim == LAUNCHER:
            return self.roots[0].pid if self.roots[0].poll() is None else None
        for pid, env in find_processes(self.token).items():
            is_rank = self.case.launcher != "torchrun" or pid != self.roots[0].pid
            if is_rank and rank_of(env) == self.case.victim:
                return pid
        return None

    # ---- the ends

    def ended(self) -> bool:
        return all(root.poll() is not None for root in self.roots) and not find_processes(self.token)

    def others(self) -> set[int]:
        """The processes that have to end by themselves: not who is stopped, nor who has started it and waits for it, as
        torchrun's agent does, and with Lightning rank 0 when its own work is done."""
        for root in self.roots:
            root.poll()
        found = {*find_processes(self.token)}
        if self.case.act == "stop":
            victim = self.pid() or 0
            waits = self.case.launcher == "torchrun" or (self.case.launcher == "lightning" and self.complete)
            found -= {victim, self.roots[0].pid} if waits else {victim}
        return found

    def all_imported(self) -> float:
        """When the last process could begin to look after the others: it had to be loaded first."""
        marks = [self.job.mark("imported", rank) for rank in range(self.case.ranks) if rank != self.case.victim]
        times = [mark.stat().st_mtime for mark in marks if mark.exists()]
        latest = max(times, default=0.0) if len(times) == len(marks) else time.time()
        return time.monotonic() - (time.time() - latest)

    def watch(self, at: float) -> tuple[list[str], float]:
        """What is not as it should be in how the processes end, and in how many seconds they did."""
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
                wrong.append(f"{there} still there {self.soon:.0f} s after they could know")
                break
            time.sleep(0.2)
        seconds = max(0.0, time.monotonic() - known)
        if not left and self.case.act == "stop":
            pid = self.pid()
            if pid is not None:
                os.kill(pid, signal.SIGCONT)
            # On a host of its own it waits for the others as long as they would have for it, had they not come yet.
            patience = self.soon + (self.timeout if self.case.early and self.case.launcher == "hosts" else 0.0)
            if not wait_until(self.ended, LONG if alone else patience):
                wrong.append(f"who was stopped is there {patience:.0f} s after it could go on")
        return wrong, 0.0 if self.case.restarts else seconds

    @property
    def complete(self) -> bool:
        """Whether all was trained nevertheless."""
        return len(self.job.weights()) == self.job.trainings

    def check(self) -> list[str]:
        """What is not as it should be after all have ended."""
        wrong = []
        for number, root in enumerate(self.roots):
            root.wait(self.soon)  # its process is gone
            victim = self.case.victim == (number if self.case.launcher == "hosts" else LAUNCHER)
            victim |= self.case.launcher == "lightning" and self.case.victim == 0
            if not victim and not self.complete and root.returncode == 0:
                wrong.append("an exit status of 0, and the work is not done")
        if self.case.restarts and self.roots[0].returncode != 0:
            wrong.append(f"torchrun did not bring it to its end: exit status {self.roots[0].returncode}")
        texts = {path.stem: path.read_text() for path in Path(self.job.folder).glob("*.said")}
        texts.pop(f"rank{self.case.victim}", None)
        aborted = [name for name, text in texts.items() if "Fatal Python error" in text or "terminate called" in text]
        if aborted:
            wrong.append(f"{', '.join(aborted)} ended by an abort")
        waited = not self.complete and not self.case.over
        if waited and any(texts.values()) and not self.named("\n".join(texts.values())):
            wrong.append("nobody names the rank")
        if left := list_entries(self.temporary):
            wrong.append(f"left in TMPDIR: {', '.join(sorted(left))}")
        return wrong

    def named(self, text: str) -> bool:
        """Whether it says who it was."""
        rank = self.case.victim
        patterns = [rf"(?<!\[)rank [\d, ]*\b{rank}\b.*({CAUSES})", rf"({CAUSES}).*rank [\d, ]*\b{rank}\b"]
        if rank == LAUNCHER:
            patterns = ["the launcher, which hosts the store", "the launcher has (ended|not answered)"]
        if rank == LAUNCHER or (rank == 0 and self.case.launcher == "lightning"):
            patterns.append("which has started this one, has ended")
        if self.case.launcher == "torchrun":  # says so itself, and ends the others before they can
            patterns.append(rf"Root Cause.*\n(.*\n)*? *rank +: {rank} \(")
        return any(re.search(pattern, text) for pattern in patterns)

    def log(self) -> str:
        paths = sorted(Path(self.job.folder).glob("*.said"))
        return "\n".join(f"---- {path.stem}\n{path.read_text()[-6000:]}" for path in paths)


def one(case: Case, soon: float, wanted: Mapping[str, str]) -> Result:
    """Has it happen, and goes on afterwards."""
    for _ in range(4):
        found = try_one(case, soon, wanted)
        if found.happened:
            return found
        case = replace(case, nth=max(1, case.nth // 3), part=case.part / 2)
    return found


def try_one(case: Case, soon: float, wanted: Mapping[str, str]) -> Result:
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
                if case.kind != "study":  # which runs no trial again that has ended
                    path.unlink()
            outcomes = watch_ranks(again, case.ranks, replace(run.job, heartbeat=120.0, timeout=1800.0), timeout=LONG)
            errors = [f"rank {o.rank} does not go on: {o.error}" for o in outcomes if o.error]
            equal = run.job.weights() == wanted
            if errors:
                log += "\n".join(["", *errors])
        if left_over := [str(path) for path in Path(run.job.folder).rglob("*.saving")]:
            wrong.append(f"half a checkpoint is left: {', '.join(left_over)}")
        return Result(case, True, tuple(wrong), equal, seconds, log)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# ---- all of them


def undisturbed(kind: str, ranks: int) -> dict[str, str]:
    """The weights of a job that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, kind, "full", ranks, 120.0, 1800.0)
        outcomes = watch_ranks(again, ranks, job, timeout=LONG)
        if errors := [o.error for o in outcomes if o.error]:
            raise SystemExit("\n".join(errors))
        return job.weights()


def table(results: Sequence[Result]) -> str:
    """Clean ends of all, by phase and by what happened."""
    rows = ["| phase | " + " | ".join(ACTS) + " |", "| --- |" + " --- |" * len(ACTS)]
    for phase in PHASES:
        cells = []
        for act in ACTS:
            these = [r for r in results if r.case.phase == phase and r.case.act == act]
            cells.append(f"{sum(not r.wrong for r in these)} of {len(these)}" if these else "")
        rows.append(f"| {phase} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def say(result: Result, total: int, done: int) -> None:
    words = "clean" if not result.wrong else f"NOT CLEAN ({'; '.join(result.wrong)})"
    words += f" after {result.seconds:.1f} s, {'bit-equal' if result.bit_equal else 'NOT EQUAL'}"
    if not result.happened:
        words = "did not happen"
    print(f"{done:3}/{total} number {result.case.number:3}: {result.case}: {words}", flush=True)


def main() -> None:
    parser = make_parser(__doc__, "8 faults")
    parser.add_argument("--faults", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of the faults, which tell all that was said")
    parser.add_argument("--at-once", type=int, default=2, help="faults at a time")
    parser.add_argument("--soon", type=float, default=10.0, help="seconds in which all have to end")
    options = parser.parse_args()
    began = time.monotonic()
    hosts = not namespaces.unavailable_reason()
    if not hosts:
        print(f"without hosts of their own and cut links: {namespaces.unavailable_reason()}")
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
    print(f"{time.monotonic() - began:.0f} s in all")
    if options.json:
        headline = {"faults": len(done), "clean_ends": clean, "bit_equal_resumes": equal}
        print(json.dumps({**headline, "slowest_end_s": round(slowest, 2)}))


if __name__ == "__main__":
    main()
