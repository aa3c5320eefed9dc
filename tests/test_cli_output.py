"""What is printed, whatever the terminal or pipe can show."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("options", "expected"), [((), "日本語 é😀"), (("--json",), "日本語 é😀")])
def test_text_that_the_encoding_of_the_output_lacks_is_not_lost(options, expected):
    code = (
        "import sys, types\n"
        "from palimpsa_surgery import cli\n"
        "module = types.SimpleNamespace(generate=lambda model, prompt, **options: ' é😀')\n"
        "sys.modules['palimpsa_surgery.recipes.evaluation.generation'] = module\n"
        f"sys.argv = ['palimpsa', 'generate', 'm', '日本語', '--device', 'cpu', *{options!r}]\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, timeout=60)
    assert result.returncode == 0, result.stderr
    said = result.stdout.decode("cp1252")
    if options:
        found = json.loads(said)
        assert found["prompt"] + found["text"] == expected
    else:
        assert said.strip() == expected.encode("cp1252", "backslashreplace").decode("cp1252")
