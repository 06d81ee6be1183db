"""Kernels at the beginning and the end of a fast step against their torch versions: on the GPU, else interpreted.

As in test_paged_triton.py, on a CPU the tests run in a process of their own with TRITON_INTERPRET=1.
"""

import pytest
import torch
from interpreted import DEVICE, HERE, run_interpreted

pytest.importorskip("triton")

if not HERE:

    def test_interpreted_in_a_process_of_its_own():
        run_interpreted(__file__)

    KINDS = {"b": "*bf16", "i": "*i8", "f": "*fp32", "d": "*fp64", "l": "*i64", "n": "*i32", "s": "i32", "e": "fp32"}

    # fmt: off
    @pytest.mark.parametrize(("kernel", "kinds", "constants", "warps"), [
        ("sampling.scan_kernel", "bffndss", dict(BLOCK=4096), 4),
        ("sampling.draw_kernel", "bfdfndlsss", dict(BLOCK=4096, PARTS=64), 4),
        ("step_inputs.step_inputs_kernel", "nnnnlnlllnnsss", dict(BLOCK_SIZE=16, TILE=128), 1),
    ], ids=lambda value: value if isinstance(value, str) and "." in value else "")  # fmt: skip
    def test_it_compiles_for_hopper(kernel, kinds, constants, warps):
        """With the constants of a 7B: what only the interpreter takes is found without a GPU."""
        import importlib

        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, compile
        from triton.language import bfloat16

        module, name = kernel.split(".")
        function = getattr(importlib.import_module(f"minfer_lib.kernels.triton.{module}"), name)
        constants = {k: bfloat16 if v == "bf16" else v for k, v in constants.items()}
        numbers = [argument for argument in function.arg_names if argument not in constants]
        assert len(numbers) == len(kinds)
        signature = {argument: KINDS[kind] for argument, kind in zip(numbers, kinds, strict=True)}
        source = ASTSource(
            fn=function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
        )
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
        assert "spill" not in compiled.asm["ptx"] and compiled.metadata.shared < 228 * 1024

else:
    from minfer_lib.fast import sampling as reference_sampling
    from minfer_lib.generation.params import SamplingParams
    from minfer_lib.generation.sampling import Sampler, uniform
    from minfer_lib.kernels import reference_step
    from minfer_lib.kernels.triton import sampling, step_inputs

    G = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=G) * scale).to(dtype).to(DEVICE)

    def test_step_inputs():
        tables = torch.randint(0, 50, (6, 9), generator=G, dtype=torch.int32).to(DEVICE)

        def numbers(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        chosen = torch.tensor([100, -1, 300], device=DEVICE)
        given = numbers(-1, 2, 0, 1, -1), numbers(7, 0, 0, 0, 9), numbers(0, 5, 35, 8, -1), numbers(3, 1, 5, 0, 0)
        got = step_inputs.step_inputs(*given, chosen, tables, 4, 999)
        right = reference_step.step_inputs(*given, chosen, tables, 4, 999)
        assert [part.tolist() for part in got] == [part.tolist() for part in right]
        assert [part.dtype for part in got] == [part.dtype for part in right]
        ids, positions, slots, lengths, _ = got
        assert ids.tolist() == [7, 300, 100, 0, 9]  # a row that goes on from no token computes something
        assert (positions[-1], slots[-1], lengths[-1]) == (0, 999, 0)
        assert slots[2] == tables[5, 8] * 4 + 3

    ROWS = 40

    @pytest.mark.parametrize("kind", ["random", "peaked", "flat", "ties", "banned", "half"])
    @pytest.mark.parametrize("vocab", [1, 17, 4096, 4097, 20_000])
    def test_draws_are_those_of_the_sampler(vocab, kind):
        logits = random(ROWS, vocab, scale={"peaked": 20.0, "flat": 0.01}.get(kind, 2.0))
        if kind == "ties":
            logits = logits.round()
        if kind == "banned":
            logits[torch.rand(ROWS, vocab, generator=G).to(DEVICE) < 0.9] = -torch.inf
            logits[:, vocab // 2] = 0.5
        if kind == "half":
            logits = logits.bfloat16()
        temperatures = [0.0, 1e-9, 0.3, 1.0, 5.0] * (ROWS // 5)
        params = [SamplingParams(temperature=t, seed=i) for i, t in enumerate(temperatures)]

        class Row:
            def __init__(self, i: int) -> None:
                self.params, self.seed, self.index, self.prompt_token_ids, self.token_ids = params[i], i, 0, [], [0] * i

        wanted = Sampler()(logits, [Row(i) for i in range(ROWS)]).token_ids
        u = uniform(range(ROWS), [0] * ROWS, range(ROWS)).to(DEVICE)
        told = torch.tensor([max(t, 1e-6) if t else 0.0 for t in temperatures], device=DEVICE)
        for sample in (sampling.sample, reference_sampling.sample):
            out = torch.full((ROWS,), -7, device=DEVICE)
            sample(logits, told, u, out)
            assert sum(a != b for a, b in zip(out.tolist(), wanted, strict=True)) <= (1 if vocab > 4097 else 0)
            alone = torch.full((1,), -7, device=DEVICE)
            sample(logits[3:4], told[3:4], u[3:4], alone)
            assert alone[0] == out[3]

    def test_a_point_on_the_very_end_is_a_token_that_has_a_probability():
        logits = torch.full((4, 9000), -torch.inf, device=DEVICE)
        logits[:, 100], logits[:, 5000] = 1.0, 1.0
        u = torch.tensor([0.0, 0.4999, 0.5001, 1 - 2**-53], dtype=torch.float64, device=DEVICE)
        out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
        sampling.sample(logits, torch.ones(4, device=DEVICE), u, out)
        assert out.tolist() == [100, 100, 5000, 5000]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_what_is_not_a_number_is_told(bad):
        logits = random(4, 5000)
        logits[1] = -torch.inf if bad == -torch.inf else logits[1]
        logits[1, 4500] = bad
        for temperature in (0.0, 0.8):
            for sample in (sampling.sample, reference_sampling.sample):
                out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
                u = torch.full((4,), 0.3, dtype=torch.float64, device=DEVICE)
                sample(logits, torch.full((4,), temperature, device=DEVICE), u, out)
                assert out[1] == -1 and (out[[0, 2, 3]] >= 0).all()

    def test_filtered_rows_beside_greedy_ones():
        logits = random(6, 300, scale=3.0)
        filters = [dict(temperature=0.8, top_k=3), {}, dict(top_p=0.5), dict(min_p=0.2), dict(temperature=2.0), {}]
        params = [SamplingParams(**({"temperature": 1.0} | each)) if each else SamplingParams() for each in filters]

        class Row:
            def __init__(self, i: int) -> None:
                self.params, self.seed, self.index, self.prompt_token_ids, self.token_ids = params[i], i, 0, [], [0] * i

        wanted = Sampler()(logits, [Row(i) for i in range(6)]).token_ids
        u = uniform(range(6), [0] * 6, range(6)).to(DEVICE)
        out = torch.zeros(6, dtype=torch.int64, device=DEVICE)
        assert reference_sampling.sample_filtered(logits, params, u, out).tolist() == wanted
