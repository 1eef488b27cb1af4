"""A process that runs one case when it is told to: `report --serve`, or a script of this folder with `--serve`."""

import json
import subprocess


class Contestant:
    def __init__(self, command):
        self.name = " ".join(command)
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"`{self.name}` ended with {self.process.wait()}")
        return json.loads(line)

    def wait_until_ready(self):
        self.name = self._answer()["ready"]
        return self

    def ask(self, seconds):
        """Starts runs for so many seconds, at least one; `answer` waits for them."""
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def answer(self):
        """Runs, their seconds together, and the amount of work of one."""
        line = self._answer()
        return line["runs"], line["seconds"], line["amount"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
