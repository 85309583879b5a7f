"""The rank pool: results, failures, hangs, and where the function may come from."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwright.testing import RankError, run_ranks


def add_up(rank: int, world_size: int, base: torch.Tensor, scale: float = 1.0) -> tuple[int, torch.Tensor]:
    total = base * (rank + 1) * scale
    dist.all_reduce(total)
    return world_size, total


def test_results_are_tensors_by_rank() -> None:
    for world_size in (1, 4, 2):
        results = run_ranks(add_up, world_size, torch.ones(3, dtype=torch.float64), scale=2.0)
        expected = torch.full((3,), float(world_size * (world_size + 1)), dtype=torch.float64)
        assert [world for world, _ in results] == [world_size] * world_size
        assert all(torch.equal(total, expected) for _, total in results)


def test_four_ranks_start_fast() -> None:
    run_ranks(add_up, 2, torch.ones(1))  # the first call starts the server
    fastest = min(duration_of_a_call() for _ in range(4))
    assert fastest < 2, "0.2 s on an idle machine; importing torch alone takes longer than this"


def duration_of_a_call() -> float:
    start = time.perf_counter()
    run_ranks(add_up, 4, torch.ones(1))
    return time.perf_counter() - start


def describe(rank: int, world_size: int) -> dict[str, object]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCH_DISTRIBUTED_DEBUG", "GIVEN_BY_TEST", "TAKEN_BY_TEST")
    return {
        "environ": {name: os.environ.get(name) for name in names},
        "rank": (dist.get_rank(), dist.get_world_size(), dist.get_backend()),
        "threads": torch.get_num_threads(),
        "random": (random.random(), float(torch.rand(()))),
        "modules": "transformers.models.llama.modeling_llama" in sys.modules,
        "directory": os.getcwd(),
    }


def test_what_a_rank_finds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAKEN_BY_TEST", "soon")
    run_ranks(describe, 1)
    monkeypatch.setenv("GIVEN_BY_TEST", "here")
    monkeypatch.delenv("TAKEN_BY_TEST")
    monkeypatch.chdir(tmp_path)
    first, second = run_ranks(describe, 2)
    assert second["environ"] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "GIVEN_BY_TEST": "here",
        "TAKEN_BY_TEST": None,
    }
    assert second["rank"] == (1, 2, "gloo")
    assert second["threads"] == 1
    assert first["random"] == second["random"]
    assert second["modules"], "transformers is imported before the ranks are forked"
    assert second["directory"] == str(tmp_path)


def speak(rank: int, world_size: int) -> None:
    print(f"line one of {rank}\nline two")
    os.write(2, b"from below Python\n")


def test_output_is_printed_by_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(speak, 2)
    out = capsys.readouterr().out
    for rank in range(2):
        assert f"[rank {rank}] line one of {rank}\n[rank {rank}] line two\n" in out
        assert f"[rank {rank}] from below Python\n" in out


def raise_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("the cause")
    dist.barrier()


def test_a_rank_that_raises() -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as info:
        run_ranks(raise_on_one, 4)
    assert time.monotonic() - start < 20
    text = str(info.value)
    assert info.value.first == 1
    assert text.startswith("rank 1 of 4 failed first\n  rank 0: ")
    assert text.endswith("ValueError: the cause")
    assert "in raise_on_one" in text
    assert "rank_process.py" not in text, "frames of the pool are noise"
    assert len(info.value.outcomes) == 4


def raise_while_others_sleep(rank: int, world_size: int) -> None:
    if rank == 2:
        raise ValueError("the cause")
    wait_for_godot()


def test_ranks_that_do_not_notice_are_stopped() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0: still running in wait_for_godot \(test_ranks.py:\d+\)") as info:
        run_ranks(raise_while_others_sleep, 3)
    assert time.monotonic() - start < 20
    assert info.value.first == 2


def raise_in_turn(rank: int, world_size: int) -> None:
    time.sleep({0: 0.6, 1: 0.3, 2: 0.0}[rank])
    raise ValueError(f"error of {rank}")


def test_the_first_error_by_time_is_shown_last() -> None:
    with pytest.raises(RankError) as info:
        run_ranks(raise_in_turn, 3)
    text = str(info.value)
    assert text.endswith("ValueError: error of 2")
    assert text.index("error of 0") < text.index("error of 1") < text.index("error of 2")


def hang_on_one(rank: int, world_size: int) -> None:
    if rank == 2:
        return
    if rank == 1:
        wait_for_godot()
    dist.all_reduce(torch.ones(1), group=None)


def wait_for_godot() -> None:
    time.sleep(1000)


def test_a_hang_prints_all_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(add_up, 2, torch.ones(1))  # the server has started then, which takes a busy machine longer than all else
    monkeypatch.setenv("SHARDWRIGHT_PATIENCE", "2.5")
    start = time.monotonic()
    with pytest.raises(RankError) as info:
        run_ranks(hang_on_one, 2, timeout=2)
    assert time.monotonic() - start < 20
    text = str(info.value)
    assert text.startswith("not all of 2 ranks ended within 5 s")
    assert "--- rank 0 ---" in text
    assert "all_reduce" in text[text.index("--- rank 0 ---") :]
    assert "in wait_for_godot" in text[text.index("--- rank 1 ---") :]
    assert "rank_process.py" in text
    assert "end_with_caller" not in text, "the thread that watches the caller is noise"
    assert info.value.first is None


def die_on_one(rank: int, world_size: int, how: str) -> None:
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "crash":
            faulthandler._sigsegv()  # type: ignore[attr-defined]
        elif how == "exit":
            print("last words", flush=True)
            os._exit(3)
        elif how == "vanish":
            os._exit(0)
        else:
            sys.exit("had enough")
    dist.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("kill", r"rank 1 was killed by SIGKILL$"),
        ("crash", r"rank 1 was killed by SIGSEGV\nFatal Python error: Segmentation fault(.|\n)* in die_on_one"),
        ("exit", r"rank 1 exited with code 3\nlast output:\n  last words$"),
        ("vanish", r"rank 1 exited with code 0 before its function returned$"),
        ("leave", r"SystemExit: had enough$"),
    ],
)
def test_a_rank_that_dies(how: str, text: str) -> None:
    with pytest.raises(RankError, match=text) as info:
        run_ranks(die_on_one, 3, how)
    assert info.value.first == 1


def abort_on_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.abort()
    dist.barrier()


def test_the_stacks_of_an_abort_are_shown_whatever_failed_first() -> None:
    """Its peer raises that the connection is lost, which may be seen first."""
    with pytest.raises(RankError, match=r"killed by SIGABRT(.|\n)*Fatal Python error: Aborted(.|\n)* in abort_on_one"):
        run_ranks(abort_on_one, 2)


def return_a_lambda(rank: int, world_size: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_be_sent() -> None:
    with pytest.raises(RankError, match="TypeError: the return value of a rank must be picklable, got function"):
        run_ranks(return_a_lambda, 2)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def local(rank: int, world_size: int) -> None: ...

    for fn in (local, lambda rank, world_size: None):
        with pytest.raises(ValueError, match="top level of a module"):
            run_ranks(fn, 2)
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(speak, 0)
    with pytest.raises(ValueError, match="timeout=0"):
        run_ranks(speak, 2, timeout=0)
    for patience in ("long", "0", "nan"):
        monkeypatch.setenv("SHARDWRIGHT_PATIENCE", patience)
        with pytest.raises(ValueError, match=f"SHARDWRIGHT_PATIENCE={patience}: it must be a positive number"):
            run_ranks(speak, 2)
    with pytest.raises(ValueError, match="debug='detail' is not one of"):
        run_ranks(speak, 2, debug="detail")
    monkeypatch.setenv("SHARDWRIGHT_PATIENCE", "1")
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "some")
    with pytest.raises(ValueError, match="debug='SOME' is not one of"):
        run_ranks(speak, 2)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_test_modules_of_equal_names(tmp_path: Path) -> None:
    """pytest's importlib mode: neither module can be imported by its name, and both have the same basename."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_same.py").write_text(
            textwrap.dedent(f"""
            from dataclasses import dataclass
            from shardwright.testing import run_ranks

            @dataclass
            class Result:
                text: str

            def work(rank, world_size, given):
                return Result(given.text + "{folder}" + str(rank))

            def test_it():
                assert run_ranks(work, 2, Result("from ")) == [Result("from {folder}0"), Result("from {folder}1")]
            """)
        )
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert "2 passed" in result.stdout, result.stdout + result.stderr


def test_ranks_end_with_a_killed_caller(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, pathlib, time
        from shardwright.testing import run_ranks

        def wait(rank, world_size, directory):
            pathlib.Path(directory, f"pid-{rank}").write_text(str(os.getpid()))
            time.sleep(1000)

        if __name__ == "__main__":
            run_ranks(wait, 2, os.path.dirname(os.path.abspath(__file__)))
        """)
    )
    caller = subprocess.Popen([sys.executable, str(script)], env=environment())
    try:
        wait_until(
            lambda: all(
                (tmp_path / f"pid-{rank}").exists() and (tmp_path / f"pid-{rank}").read_text() for rank in range(2)
            ),
            240,  # of imports, on a machine that others use
        )
    finally:
        caller.kill()
        caller.wait()
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    wait_until(lambda: not any(is_running(pid) for pid in pids), 20)


def wait_until(condition, limit: float) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False
