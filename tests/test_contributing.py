"""CONTRIBUTING.md says where the tests of every module are."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src/xlstm7b"
# Their tests are arranged with their own modules.
OTHERS = {"bench", "evaluate"}


def test_every_module_has_tests_that_are_found_by_its_path() -> None:
    page = (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {
        module: [TESTS / test for test in re.findall(r"`(\S+)`", tests)]
        for modules, tests in re.findall(r"^\| (`.*) \| (.*) \|$", page, re.MULTILINE)
        for module in re.findall(r"`(\S+)`", modules)
    }
    for path in SOURCE.rglob("*.py"):
        module = path.relative_to(SOURCE)
        if path.name.startswith("__") or module.parts[0] in OTHERS:
            continue
        folder, stem = TESTS / module.parent, path.stem
        if {*folder.glob(f"test_{stem}.py"), *folder.glob(f"test_{stem}_*.py")}:
            assert str(module) not in named, f"{module} needs no row"
            continue
        tests = named.pop(str(module), [])
        assert tests, f"{module} has no test file of its name and no row in CONTRIBUTING.md"
        assert all(test.is_file() for test in tests), tests
    assert not named, "of modules that are no more"
