"""While it serves, the collector leaves alone what was there before; afterwards all is as it was. Processes can be started deaf."""

import gc
import signal
import subprocess
import sys

from needlework.serve.process import ENDS, SWITCH, deaf, settled


def test_what_was_there_is_collected_no_more_while_it_serves():
    interval, frozen = sys.getswitchinterval(), gc.get_freeze_count()
    with settled():
        assert gc.get_freeze_count() > frozen and abs(sys.getswitchinterval() - SWITCH) < 1e-6
    assert bool(gc.get_freeze_count()) == bool(frozen) and sys.getswitchinterval() == interval


def test_a_process_that_is_started_deaf_hears_nothing_that_ends_it():
    mask = lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before, told = mask(), "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    with deaf():
        said = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout
    assert {int(one) for one in said.split()} >= set(ENDS) and mask() == before
