"""Marks tell kernels apart, and kernels can be fixed in a process that has computed nothing."""

import json
import subprocess
import sys

from manyhands.values.environment import PORTABLE

TRY = """
import json, os, sys
import torch
from manyhands.training.compute.kernel_marks import fix_kernels, kernels_here

def forked(act):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        try:
            act()
            said = {"marks": kernels_here(portable=False, precision="fp32").marks}
        except Exception as error:
            said = {"error": str(error)}
        said["left"] = os.environ.get("MKL_CBWR")
        os.write(writer, json.dumps(said).encode())
        os._exit(0)
    os.close(writer)
    return json.loads(os.read(reader, 1 << 16))

def late():
    torch.ones(50, 50) @ torch.ones(50, 50)
    fix_kernels()

others = lambda: os.environ.update(ATEN_CPU_CAPABILITY="default")
torch.set_num_threads(1)
print(json.dumps({
    "plain": forked(lambda: None), "again": forked(lambda: None), "fixed": forked(fix_kernels),
    "other": forked(others), "late": forked(late),
}))
"""


def found(**environment: str) -> dict[str, dict[str, str]]:
    import os

    done = subprocess.run(
        [sys.executable, "-c", TRY],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout)


def test_marks_tell_kernels_apart_and_fixing_them_in_time_is_as_good_as_from_the_start() -> None:
    here = found()
    assert here["plain"]["marks"] == here["again"]["marks"]
    assert here["plain"]["marks"] != here["other"]["marks"]
    assert here["fixed"]["marks"] == found(**PORTABLE)["fixed"]["marks"]
    kinds = ("products", "functions", "sums")
    alike = [kind for kind in kinds if here["fixed"]["marks"][kind] == here["plain"]["marks"][kind]]
    assert not alike, "MKL's own products and roots are others"
    assert here["fixed"]["left"] is None, "processes that are started later choose for themselves"
    assert "torch has computed in this process already" in here["late"]["error"]
    assert "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" in here["late"]["error"]
