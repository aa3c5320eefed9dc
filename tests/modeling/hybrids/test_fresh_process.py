"""Folders of hybrids bring their code: one process without this package loads every kind."""

import pytest
import torch
from absent import ABSENT, run
from palimpsa_surgery.modeling.hybrids.configuration_palimpsa_hybrid import known_hosts
from tiny_hybrids import token_ids

FP32 = 1e-5  # relative L2: other kernels run there

CODE = """
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    home, *kinds = sys.argv[1:]
    ids = torch.load(home + "/ids.pt")
    for kind in kinds:
        source, again = f"{home}/{kind}", f"{home}/{kind}-again"
        try:
            AutoModelForCausalLM.from_pretrained(source, trust_remote_code=False)
        except ValueError as error:
            assert "trust_remote_code=True" in str(error), error
        else:
            raise AssertionError("code was run without the flag")
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        assert type(model).__module__.endswith(".modeling_palimpsa_hybrid"), type(model).__module__
        with torch.no_grad():
            logits = model(ids).logits
            hidden = AutoModel.from_pretrained(source, trust_remote_code=True)(ids).last_hidden_state
            assert torch.equal(hidden, model.base_model(ids).last_hidden_state)
            tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
            model.save_pretrained(again)
            model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
            assert torch.equal(model(ids).logits, logits)
        torch.save((logits, tokens), f"{home}/{kind}.pt")
"""


@pytest.mark.slow
def test_every_kind_loads_generates_and_saves_where_the_package_is_absent(tmp_path, hybrid, save_with_code):
    torch.save(token_ids(), tmp_path / "ids.pt")
    for kind in known_hosts():
        save_with_code(hybrid(kind), tmp_path / kind)
    done = run(CODE, tmp_path, *known_hosts(), home=tmp_path, absent=(*ABSENT, "numba"))
    assert done.returncode == 0, done.stderr
    for kind in known_hosts():
        logits, tokens = torch.load(tmp_path / f"{kind}.pt")
        with torch.no_grad():
            expected = hybrid(kind)(token_ids()).logits
            assert (logits - expected).norm() < FP32 * expected.norm()
            assert torch.equal(tokens, hybrid(kind).generate(token_ids(), max_new_tokens=4, do_sample=False))
