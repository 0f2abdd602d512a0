"""The local launcher with small children that load no torch: deaths, signals, ports, exit codes, environment."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from paceline.core.errors import InputError, RunFailed
from paceline.launch import LocalJob, run

SLEEP = "import time; time.sleep(120)"
RANK = "import os, sys, time, signal; rank = int(os.environ['RANK'])\n"


def command(code: str) -> list[str]:
    return [sys.executable, "-c", RANK + textwrap.dedent(code)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_all_ranks_end_well_and_each_knows_its_place(tmp_path: Path) -> None:
    code = """
        import json
        json.dump(dict(os.environ), open(f"{os.environ['OUT']}/{rank}.json", "w"))
    """
    base = {"PATH": os.environ["PATH"], "OUT": str(tmp_path)}
    assert run(LocalJob(argv=command(code), procs=3, environment=base)) == 0
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [env["RANK"] for env in seen] == [env["LOCAL_RANK"] for env in seen] == ["0", "1", "2"]
    assert {(env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], env["MASTER_ADDR"]) for env in seen} == {
        ("3", "3", "127.0.0.1")
    }
    assert len({env["MASTER_PORT"] for env in seen}) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_killed_rank_ends_the_others_within_10_seconds(number: signal.Signals, tmp_path: Path) -> None:
    code = f"""
        open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))
        if rank == 1:
            print("the last words of rank one", file=sys.stderr, flush=True)
            os.kill(os.getpid(), {int(number)})
        time.sleep(120)
    """
    start = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        run(LocalJob(argv=command(code), procs=3))
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert f"Rank 1 of 3 was killed by signal {int(number)} ({number.name})" in message
    assert "the last words of rank one" in message
    wait_until(lambda: not any(alive(int(path.read_text())) for path in tmp_path.iterdir()))


def test_ranks_that_ignore_sigterm_are_killed(tmp_path: Path) -> None:
    code = f"""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{tmp_path}/{{rank}}", "w").write(str(os.getpid()))
        if rank == 0:
            while len(os.listdir("{tmp_path}")) < 2: time.sleep(0.01)
            sys.exit(7)
        time.sleep(120)
    """
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"Rank 0 of 2 exited with code 7 .* It wrote nothing to stderr"):
        run(LocalJob(argv=command(code), procs=2, kill_after_s=0.5))
    assert time.monotonic() - start < 10
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_the_cause_is_told_not_the_rank_that_noticed_it() -> None:
    code = """
        if rank == 0:
            time.sleep(0.1)
            sys.exit("lost its peer")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(RunFailed, match="Rank 1 of 2 was killed by signal 9"):
        run(LocalJob(argv=command(code), procs=2))


@pytest.mark.parametrize("code", [2, 3])
def test_a_rank_that_explains_itself_passes_its_code_on(code: int, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"""
        print("the recipe is wrong", file=sys.stderr, flush=True)
        sys.exit({code})
    """
    assert run(LocalJob(argv=command(script), procs=2)) == code
    assert capfd.readouterr().err.count("the recipe is wrong") == 1


def test_the_words_of_another_rank_are_shown_if_only_that_one_explains(capfd: pytest.CaptureFixture[str]) -> None:
    script = """
        if rank == 1:
            sys.exit(print("no file on this rank", file=sys.stderr) or 2)
        time.sleep(60)
    """
    assert run(LocalJob(argv=command(script), procs=2)) == 2
    assert "no file on this rank" in capfd.readouterr().err


def test_ranks_that_saved_on_their_own_signal_give_75() -> None:
    assert run(LocalJob(argv=command("sys.exit(75)"), procs=2)) == 75


def test_output_is_logged_by_rank_and_other_ranks_are_marked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = "print('out', rank, flush=True); print('err', rank, file=sys.stderr)"
    assert run(LocalJob(argv=command(script), procs=2, log_dir=tmp_path / "logs")) == 0
    shown = capfd.readouterr()
    assert "out 0\n" in shown.out
    assert "[rank 1] out 1\n" in shown.out
    assert shown.err == "err 0\n"
    assert (tmp_path / "logs/rank-0.log").read_text() == "err 0\n"
    assert sorted((tmp_path / "logs/rank-1.log").read_text().splitlines()) == ["err 1", "out 1"]


def test_i75_two_jobs_at_once_take_different_ports_and_a_busy_one_is_told_at_once() -> None:
    with socket.socket() as owner:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        start = time.monotonic()
        with pytest.raises(InputError, match=f"Port {port} is in use on 127.0.0.1 .*a free one is taken"):
            run(LocalJob(argv=command(SLEEP), procs=2, port=port))
        assert time.monotonic() - start < 1
        assert run(LocalJob(argv=command(f"sys.exit(os.environ['MASTER_PORT'] == '{port}')"), procs=2)) == 0


@pytest.mark.parametrize(("port", "says"), [(0, "a port is 1 to 65535"), (70000, "a port is 1 to 65535")])
def test_a_port_that_does_not_exist_is_refused(port: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(LocalJob(argv=command("pass"), procs=1, port=port))


def test_a_command_that_does_not_exist_and_no_ranks_are_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be started: /no/such/program: No such file"):
        run(LocalJob(argv=["/no/such/program"], procs=2))
    with pytest.raises(InputError, match="at least 1 is needed"):
        run(LocalJob(argv=command("pass"), procs=0))


LAUNCHER = """
import sys
from paceline.core.errors import PacelineError
from paceline.launch import LocalJob, run
try:
    code = run(LocalJob(argv=[sys.executable, "-c", sys.argv[1]], procs=2, grace_s=float(sys.argv[2])))
except PacelineError as error:
    print(error, file=sys.stderr)
    code = error.exit_code
assert "torch" not in sys.modules
sys.exit(code)
"""


def launcher(marks: Path, code: str, grace_s: float = 60.0) -> subprocess.Popen[str]:
    script = RANK + "import os, pathlib\nmarks = os.environ['MARKS']\n" + textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, script, str(grace_s)],
        env={**os.environ, "MARKS": str(marks)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: len(list(marks.glob("ready-*"))) == 2)
    return process


SAVES = """
    def save(number, frame):
        with open(f"{marks}/got-{rank}", "a") as file: file.write(f"{number} ")
        time.sleep(0.5)
        sys.exit(75)
    signal.signal(signal.SIGTERM, save); signal.signal(signal.SIGINT, save)
    pathlib.Path(f"{marks}/ready-{rank}").write_text(str(os.getpid()))
    time.sleep(120)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_each_rank_once_and_they_may_save(number: signal.Signals, tmp_path: Path) -> None:
    process = launcher(tmp_path, SAVES)
    process.send_signal(number)
    if number == signal.SIGTERM:  # schedulers repeat it; the ranks must not be disturbed while they save
        time.sleep(0.2)
        process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 75, error
    assert [(tmp_path / f"got-{rank}").read_text() for rank in range(2)] == [f"{int(number)} "] * 2


def test_ranks_without_a_handler_end_with_the_signal(tmp_path: Path) -> None:
    process = launcher(tmp_path, "pathlib.Path(f'{marks}/ready-{rank}').touch(); time.sleep(120)")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM


def test_ranks_that_do_not_stop_in_the_time_of_grace_are_killed(tmp_path: Path) -> None:
    deaf = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(f"{marks}/ready-{rank}").write_text(str(os.getpid()))
        time.sleep(120)
    """
    process = launcher(tmp_path, deaf, grace_s=1.0)
    process.terminate()
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "Ranks 0, 1 had not ended within 1 s after signal 15 (SIGTERM)" in error
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("ready-*"))


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path) -> None:
    deaf = """
        signal.signal(signal.SIGINT, lambda *_: pathlib.Path(f"{marks}/got-{rank}").touch())
        pathlib.Path(f"{marks}/ready-{rank}").write_text(str(os.getpid()))
        for _ in range(1200): time.sleep(0.1)
    """
    process = launcher(tmp_path, deaf)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(list(tmp_path.glob("got-*"))) == 2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "had not ended at the second Ctrl-C" in error


def test_a_killed_launcher_leaves_no_orphans(tmp_path: Path) -> None:
    process = launcher(tmp_path, SAVES)
    pids = [int(path.read_text()) for path in tmp_path.glob("ready-*")]
    assert all(alive(pid) for pid in pids)
    process.kill()
    process.communicate(timeout=20)
    wait_until(lambda: not any(alive(pid) for pid in pids), 10)
