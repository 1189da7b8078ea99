"""Log-probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.protocol.messages.generation import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    nums_top: Sequence[int],
    named: Sequence[tuple[int, ...]] = (),
) -> list[TokenLogprobs]:
    """Return, per row of `logits` [num_rows, vocab_size], the logprobs of its token and its `nums_top` likeliest.

    named: token ids of each row. A row that has some gets the logprobs of its token and of these in place of the
    likeliest. Ids beyond the vocabulary are left out.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(min(max(nums_top), logprobs.shape[-1]), dim=-1)
    # One copy to the host; float64 holds token ids and float32 values exactly.
    rows = torch.cat((own.double(), ranks[:, None].double(), values.double(), ids.double()), -1).tolist()
    width = values.shape[-1]
    results = [
        TokenLogprobs(
            row[0],
            int(row[1]),
            [(int(token_id), value) for token_id, value in zip(row[2 + width :], row[2 : 2 + width], strict=True)][
                :num_top
            ],
        )
        for row, num_top in zip(rows, nums_top, strict=True)
    ]
    for row, wanted in enumerate(named):
        if wanted:
            ids_of_row = [int(token_ids[row]), *(i for i in wanted if i < logprobs.shape[-1] and i != token_ids[row])]
            row_values = logprobs[row, torch.tensor(ids_of_row, device=logits.device)].tolist()
            top = list(zip(ids_of_row, row_values, strict=True))
            results[row] = TokenLogprobs(results[row].logprob, results[row].rank, top)
    return results
