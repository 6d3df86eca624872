"""Sends what a service lacks of a run's folder, in a thread of rank 0 that a training waits for
only at its end.
"""

from abc import abstractmethod
from pathlib import Path

from yolo_seg_ddp.run.records import read_status
from yolo_seg_ddp.run.status import FAILED, FINISHED
from yolo_seg_ddp.utils.errors import one_line, print_warning
from yolo_seg_ddp.utils.threads import BackgroundWatch

POLL_S, MOST_BACKOFF_S = 2.0, 60.0
# at any end but the regular one; schedulers grant 30 seconds between a stop and a kill
STOP_WAIT_S = 20.0


class FolderSender(BackgroundWatch):
    """Sends a run's folder while it is a context manager, and at its end. Whatever the service
    answers, the training continues.

    `finish_wait_s`: how long the end of a finished training waits, if the service answered last
    time.
    """

    finish_wait_s = 60.0

    def __init__(self, service: str, folder: Path) -> None:
        super().__init__(service)
        self._service = service
        self._folder = folder
        self._state = self._problem = ""

    def __exit__(self, *error: object) -> None:
        self._state = (
            FAILED if error[0] is not None else str(read_status(self._folder).get("state"))
        )
        is_regular = self._state == FINISHED and not self._problem
        self._max_wait_s = self.finish_wait_s if is_regular else STOP_WAIT_S
        super().__exit__(*error)
        is_late = self._thread is not None and self._thread.is_alive()
        if problem := self._problem or (
            f"not done after {self._max_wait_s:g} s" if is_late else ""
        ):
            lacks = f"{self._service} lacks a part of this run"
            print_warning(f"{lacks} ({problem}); the same training command sends the rest")

    @abstractmethod
    def _send(self, state: str) -> None:
        """Send what is new; `state` is that of the run at its end, and empty before."""

    def _watch(self) -> None:
        delay_s = POLL_S
        has_warned = False
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(delay_s)
            try:
                self._send(self._state if is_over else "")
                if has_warned:
                    print(f"{self._service}: works again, and has everything", flush=True)
                self._problem = ""
                delay_s = POLL_S
                has_warned = False
            except Exception as error:  # noqa: BLE001 # each service's package has its own
                self._problem, delay_s = one_line(error, 400), min(2 * delay_s, MOST_BACKOFF_S)
                if not (has_warned or is_over):
                    has_warned = True
                    text = "training continues, and the rest is sent when this works"
                    print_warning(f"{self._service}: {self._problem}; {text}")
