"""Runs one of CPython's own test modules and says of each test how it ended. With --timeout, which is a suite's
limit as that of `python3 -m test`, the tests' own limits are longer on slow machines. Usage: run_tests.py [--timeout SECONDS] MODULE
[PATTERN | !PATTERN]..."""
import faulthandler
import fnmatch
import sys
import time
import types
import unittest

from test import support

timeout = 600
if sys.argv[1] == "--timeout":
    timeout = int(sys.argv[2])
    del sys.argv[1:3]
# `python3 -m test` does the same.
support.LOOPBACK_TIMEOUT = max(support.LOOPBACK_TIMEOUT, timeout / 120)
support.SHORT_TIMEOUT = max(support.SHORT_TIMEOUT, timeout / 40)
support.LONG_TIMEOUT = max(support.LONG_TIMEOUT, timeout / 4)
# As `python3 -m test` does unless told otherwise: nothing that needs the world outside, and nothing huge.
support.use_resources = ["network"] if sys.argv[1].endswith("socketserver") else []
faulthandler.dump_traceback_later(timeout, exit=True)
# These tests fail if a call that need not wait lasts 10 or 100 ms. A loaded machine may stop them for longer. A missed event lasts a second, and
# is missed in what the call returns as well.
SLOWER_CLOCKS = {"test.test_epoll": 20}


class Result(unittest.TextTestResult):
    def say(self, test, outcome):
        # Tests and what they start print as well.
        sys.stdout.write(f"\nRESULT {test.id()} {outcome}\n")
        sys.stdout.flush()

    def addSuccess(self, test):
        super().addSuccess(test)
        self.say(test, "ok")

    def addError(self, test, error):
        super().addError(test, error)
        self.say(test, f"error {error[0].__name__}")

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.say(test, "failure")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.say(test, "skipped")

    def addExpectedFailure(self, test, error):
        super().addExpectedFailure(test, error)
        self.say(test, "expected failure")

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.say(test, "unexpected success")

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.say(test, f"subtest {error[0].__name__}")


def chosen(suite, patterns):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from chosen(test, patterns)
        else:
            wanted = [p for p in patterns if not p.startswith("!")]
            unwanted = [p[1:] for p in patterns if p.startswith("!")]
            fits = lambda some: any(fnmatch.fnmatchcase(test.id(), p) for p in some)
            if (not wanted or fits(wanted)) and not fits(unwanted):
                yield test


if __name__ == "__main__":
    loaded = unittest.defaultTestLoader.loadTestsFromName(sys.argv[1])
    if sys.argv[1] in SLOWER_CLOCKS:
        slower = SLOWER_CLOCKS[sys.argv[1]]
        sys.modules[sys.argv[1]].time = types.SimpleNamespace(monotonic=lambda: time.monotonic() / slower)
    if len(sys.argv) > 2:
        loaded = unittest.TestSuite(chosen(loaded, sys.argv[2:]))
    unittest.TextTestRunner(sys.stderr, resultclass=Result).run(loaded)
