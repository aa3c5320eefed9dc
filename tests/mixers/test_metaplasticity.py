import pytest
import torch
from palimpsa_surgery.modeling import Metaplasticity, metaplasticity_off


@pytest.fixture
def gate(tiny_config):
    def build(seed=0, **over):
        torch.manual_seed(seed)
        config = tiny_config(**over)
        module = Metaplasticity(config.mixer_geometry(), config.gate)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_()
        return module

    return build


def inputs():
    return torch.randn(2, 7, 24), torch.rand(2, 7, 6)


@pytest.mark.parametrize("form", ["abs", "softplus"])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_beta_is_the_formula(gate, form, groups, rel):
    module = gate(beta_scale_form=form, beta_groups=groups).double()
    hidden, step = (tensor.double() for tensor in inputs())
    beta, prior = module(hidden, step)
    s = module.beta_scale
    scale = s.abs() if form == "abs" else torch.log(1 + torch.exp(s))
    logits = hidden @ module.beta_down.weight.T @ module.beta_up.weight.T
    for head in range(6):
        for group in range(groups):
            expected = torch.sigmoid(logits[..., head * groups + group]) * scale[head] * step[..., head]
            assert rel(beta[..., head, group], expected) < 1e-12
    assert rel(prior, module.log_prior.exp()) < 1e-12


def test_names_and_shapes_of_the_new_tensors(gate):
    shapes = {name: tuple(tensor.shape) for name, tensor in gate(beta_groups=2).state_dict().items()}
    assert shapes == {
        "beta_scale": (6,),
        "log_prior": (6,),
        "beta_down.weight": (5, 24),
        "beta_up.weight": (12, 5),
    }


def test_beta_is_zero_where_the_step_is(gate):
    hidden, step = inputs()
    step[0, :3] = 0.0
    beta, _ = gate()(hidden, step)
    assert beta[0, :3].abs().max() == 0
    assert beta[0, 3:].abs().min() > 0


def test_abs_form_reaches_exact_zero_and_moves_from_a_tiny_value(gate):
    module = gate(beta_scale_form="abs")
    with torch.no_grad():
        module.beta_scale.fill_(1e-6)
    assert torch.equal(module.scale(), torch.full((6,), 1e-6))
    module.scale().sum().backward()
    assert torch.equal(module.beta_scale.grad, torch.ones(6))
    with torch.no_grad():
        module.beta_scale.zero_()
    assert module(*inputs())[0].abs().max() == 0


@pytest.mark.parametrize("form", ["abs", "softplus"])
@pytest.mark.parametrize("value", [-1e4, -3.0, 0.0, 3.0, 1e4])
def test_importance_never_reaches_zero_whatever_the_optimizer_does(gate, form, value):
    module = gate(beta_scale_form=form)
    with torch.no_grad():
        module.beta_scale.fill_(value)
        module.log_prior.fill_(value)
    beta, prior = module(*inputs())
    assert beta.min() >= 0
    assert prior.min() > 0
    assert torch.isfinite(beta).all()
    assert torch.isfinite(prior).all()


@pytest.mark.parametrize("train_prior", [True, False])
def test_train_prior_decides_whether_log_prior_learns(gate, train_prior):
    module = gate(train_prior=train_prior)
    assert module.log_prior.requires_grad is train_prior
    assert module.beta_scale.requires_grad


def test_off_means_no_importance_and_a_prior_of_one(gate):
    module = gate(beta_groups=2)
    with metaplasticity_off(module):
        beta, prior = module(*inputs())
    assert beta.shape == (2, 7, 6, 2)
    assert beta.abs().max() == 0
    assert torch.equal(prior, torch.ones(6))


def test_off_ends_with_the_block_nested_or_with_an_error(lively_model, ids):
    model = lively_model()
    with torch.no_grad():
        on = model(ids).logits
        with metaplasticity_off(model):
            off = model(ids).logits
            with metaplasticity_off(model):
                pass
            assert torch.equal(model(ids).logits, off)
        assert torch.equal(model(ids).logits, on)
        with pytest.raises(RuntimeError, match="inside"), metaplasticity_off(model):
            raise RuntimeError("inside")
        assert torch.equal(model(ids).logits, on)


@pytest.mark.parametrize("form", ["abs", "softplus"])
def test_off_equals_the_same_weights_as_plain_mamba2(lively_model, ids, rel, form):
    from palimpsa_surgery.modeling import PalimpsaMamba2ForCausalLM

    model = lively_model(beta_scale_form=form)
    source = lively_model(palimpsa_layers=[])
    assert isinstance(source, PalimpsaMamba2ForCausalLM)
    shared = {name: tensor for name, tensor in model.state_dict().items() if "metaplasticity" not in name}
    source.load_state_dict(shared)
    with torch.no_grad(), metaplasticity_off(model):
        assert rel(model(ids).logits, source(ids).logits) < 1e-5


def test_identity_start_is_exact_enough_and_all_new_parameters_move(lively_model, ids, rel):
    """From a tiny scale, 50 steps of Adam at a common rate: the scale grows, and both projections move."""
    model, ids = lively_model(beta_scale_form="abs"), ids[:, :13]
    gates = [block.mixer.metaplasticity for block in model.backbone.layers if hasattr(block.mixer, "metaplasticity")]
    with torch.no_grad():
        for module in gates:
            module.beta_scale.fill_(1e-6)
            module.log_prior.zero_()
        with metaplasticity_off(model):
            source = model(ids).logits
        assert rel(model(ids).logits, source) < 1e-4
    down = [module.beta_down.weight.detach().clone() for module in gates]
    new = [parameter for module in gates for parameter in module.parameters()]
    optimizer = torch.optim.Adam(new, lr=1e-3)
    for _ in range(50):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for module, start in zip(gates, down, strict=True):
        assert module.scale().max() > 1e-4
        assert (module.beta_down.weight - start).abs().max() > 1e-3
