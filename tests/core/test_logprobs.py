import torch

from tether.core.logprobs import chunked_token_logprobs, predicting_positions, token_logprobs


def setup():
    torch.manual_seed(1)
    head = torch.nn.Linear(5, 17).double()
    hidden = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(0, 17, (11,)), torch.randn(11, dtype=torch.float64)


def test_chunked_logprobs_and_their_gradient_equal_plain_autograd_for_frozen_and_trained_heads():
    head, hidden, tokens, weights = setup()
    plain = torch.log_softmax(head(hidden) / 0.7, dim=-1)[torch.arange(11), tokens]
    (expected,) = torch.autograd.grad((weights * plain).sum(), hidden)
    for frozen in (True, False):
        for chunk in (1, 4, 64):
            got = chunked_token_logprobs(
                hidden, tokens, head, temperature=0.7, head_is_frozen=frozen, chunk=chunk
            )
            (gradient,) = torch.autograd.grad((weights * got).sum(), hidden)
            torch.testing.assert_close(got, plain, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_trained_head_receives_its_gradient_too():
    head, hidden, tokens, weights = setup()
    plain = torch.log_softmax(head(hidden), dim=-1)[torch.arange(11), tokens]
    expected = torch.autograd.grad((weights * plain).sum(), head.weight)[0]
    got = chunked_token_logprobs(
        hidden, tokens, head, temperature=1.0, head_is_frozen=False, chunk=3
    )
    (gradient,) = torch.autograd.grad((weights * got).sum(), head.weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_head_is_applied_once_for_both_passes():
    head, hidden, tokens, weights = setup()
    calls = []
    counted = lambda h: calls.append(len(h)) or head(h)  # noqa: E731
    got = chunked_token_logprobs(
        hidden, tokens, counted, temperature=1.0, head_is_frozen=True, chunk=4
    )
    (weights * got).sum().backward()
    assert calls == [4, 4, 3]


def test_temperature_divides_logits_not_logprobs():
    logits = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    got = token_logprobs(logits, torch.tensor(0), 0.5)
    expected = torch.log_softmax(logits / 0.5, dim=-1)[0]
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    assert abs(got - torch.log_softmax(logits, dim=-1)[0] / 0.5) > 0.1


def test_half_precision_logits_are_normalised_in_float32():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    got = token_logprobs(logits, torch.zeros(4, dtype=torch.long), 1.0)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got, torch.log_softmax(logits.float(), dim=-1)[:, 0], rtol=1e-6, atol=1e-6
    )


def test_the_predicting_state_is_one_before_the_token():
    hidden = torch.arange(7.0).reshape(1, 7, 1)
    got = predicting_positions(hidden, prompt_width=3, response_width=4)
    assert got.flatten().tolist() == [2.0, 3.0, 4.0, 5.0]


def test_a_small_vocabulary_gets_longer_chunks_of_the_same_size():
    from tether.core.logprobs import CHUNK_LOGITS, chunk_positions

    assert chunk_positions(49_152) == chunk_positions(150_000) == 256
    assert chunk_positions(8) * 8 == CHUNK_LOGITS
