"""Prints which tests failed, each with the last lines of what it said: `python .ci/failures.py JUNIT_FILE`."""

import sys
import xml.etree.ElementTree


LINES = 15


def main(path: str) -> int:
    try:
        cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        print(f"pytest was ended before it could say which tests failed ({error}). Its last lines:")
        return 1
    for case in cases:
        for kind in ("failure", "error"):
            for fault in case.iter(kind):
                print(f"\n{kind.upper()} {case.get('classname')}::{case.get('name')}")
                print("\n".join(f"    {line}" for line in (fault.text or "").strip().splitlines()[-LINES:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
