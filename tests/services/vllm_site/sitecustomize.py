"""Has vLLM's processes sleep where they would only offer their turn; its Python runs this file first.

Its engine and its worker wait for each other in a loop around `sched_yield`, from the first token of a
stream to its last (vllm pull 52814 would make that a setting). On Linux 6.18 two such processes on two
cores leave nobody else a turn: a caller that was ready to run waited 17 s of 18 (the kernel's commit
1319ea57529e mends its part). 0.1 ms is a tenth of a step of the small models here.
"""

import os
import time


def _sleep() -> None:
    time.sleep(0.000_1)


os.sched_yield = _sleep
