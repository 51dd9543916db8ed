"""Each recipe at TINY size: the eager reference beside the tuned code, in f32.

On the CPU, or with TUNED_DEVICE=cuda on the card. Where own kernels can run (TRITON_INTERPRET=1 lets them run on a CPU) what has them is checked twice.
"""
import contextlib, dataclasses, json, os, sys
from unittest import mock
import torch
from adapters import Base, PolicyTraining, PolychromicTraining, adapters_of, diversity
from choose import own_kernels
from common import S, compiled, option, trainable, trainer
from geometry import lior_step
from language import HydraTraining, merged
from puzzles import hrm_step
from reasoning import HrmLmTraining, merged as merged_hrm_lm
from vision import vision_step
from writing import Writer, nucleus
import hrm, hrm_lm, hydra, lior, polychromic, usual_hrm_lm, vision_bdh

OK = True


def worst(a, b):
    """What is no number counts as infinitely wrong: Python's max would drop it."""
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).nan_to_num(nan=float("inf")).item()


def say(name, **errors):
    global OK
    good = all(e == e and e < 1e-4 for e in errors.values())
    OK &= good
    print(json.dumps(dict(check=name, kernels=option("KERNELS", "torch"), ok=good, **{k: float(f"{e:.1e}") for k, e in errors.items()})), flush=True)


def updated(masters, grads, update):
    """How far `update` is from clip_grad_norm_ and plain AdamW with these gradients."""
    before = [p.detach().clone() for p in masters]
    twins = [torch.nn.Parameter(p.clone()) for p in before]
    for p, g in zip(twins, grads):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(twins, 1.0)
    torch.optim.AdamW(twins, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1).step()
    update()
    return max(worst(1e4 * (p.detach() - o), 1e4 * (q.detach() - o)) for p, q, o in zip(masters, twins, before)) / 10


def gradients(name, m, reference, backward):
    """The gradients of the module's own parameters, and the step that `trainer` makes of them (ten times larger, so that the clip works)."""
    loss = reference()
    loss.backward()
    wanted = {n: p.grad for n, p in m.named_parameters() if p.requires_grad}
    m.zero_grad(set_to_none=True)
    ours = backward()
    missing = [n for n, p in m.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing, missing
    params = trainable(m)
    errors = dict(loss=worst(ours, loss.detach()), gradients=max(worst(p.grad, wanted[n]) for n, p in m.named_parameters() if p.requires_grad))
    for p in params:
        p.grad = 10 * p.grad
    say(name, **errors, update=updated(params, [p.grad for p in params], trainer(params)))


def rounded(name, m, reference, training, of, after=None):
    """The same for steps with masters, copies and an optimizer of their own. of(m, get): what they train, by name. after: what updates; False for no update."""
    loss = reference()
    loss.backward()
    wanted = of(m, lambda p: p.grad)
    m.zero_grad(set_to_none=True)
    ours, p = training.backward(), training.p
    found = p.named(p.gradients())
    errors = dict(loss=worst(ours, loss.detach()), gradients=max(worst(found[n], g) for n, g in wanted.items()), names=float(len(found.keys() ^ wanted.keys())))
    if after is False:
        p.forget()
        return say(name, **errors)
    p.grads = {n: 10 * g for n, g in found.items()}
    grads = list(p.grads.values())
    update = updated([p.value(n) for n in found], grads, after or training.optimizer.step)
    copies = max(worst(low.float(), p.value(n)) for n, low in p.named(p.copy).items())   # what the next step reads
    say(name, **errors, update=update, copies=copies if S.low == torch.float32 else 0.0)


def check_hydra():
    c = dataclasses.replace(hydra.TINY, seq=40)
    m = hydra.Hydra(c).to(S.device); m.init(None)
    ids = torch.randint(0, c.vocab, (3, c.seq), device=S.device)
    targets = ids.roll(-1, 1).contiguous(); targets[0, :7] = -1
    rounded("hydra", m, lambda: m(ids, targets)[0], HydraTraining(m, ids, targets, small=3000), merged)


def check_vision():
    c = vision_bdh.TINY
    v = vision_bdh.VisionBdh(c).to(S.device); v.init(None)
    images, labels = torch.randn(5, 3, c.image, c.image, device=S.device), torch.randint(0, c.classes, (5,), device=S.device)
    gradients("vision_bdh", v, lambda: v(images, labels)[0], vision_step(v, images, labels, 2))


def check_hrm():
    c = dataclasses.replace(hrm.TINY, layers=2)
    h = hrm.Hrm(c).to(S.device); h.init(None)
    torch.nn.init.normal_(h.halt, std=0.1)
    ids, targets = torch.randint(1, 11, (6, c.seq), device=S.device), torch.randint(2, 11, (6, c.seq), device=S.device)
    targets[0] = -1
    with torch.compiler.set_stance("force_eager" if S.low == torch.float32 else "default"):   # 2.11 traces grouped products in bf16 alone
        gradients("hrm", h, lambda: h(h.start(6, S.device), ids, targets)[1], hrm_step(h, h.start(6, S.device), ids, targets))


def check_hrm_lm():
    """The expert's step, and beside it what the usual one changes of the reference (`usual`)."""
    tiny = dataclasses.replace(hrm_lm.TINY, capacity=0.8)   # not all choices find a place
    for name, c, padded, options in (("hrm_lm", tiny, False, {}), ("hrm_lm, padded", tiny, True, dict(CROSS="absorbed", UP="epilogue")),
                                     ("hrm_lm, all cycles", dataclasses.replace(tiny, gradient="all", top_k=1, gate_bias=0.1), False, dict(CROSS="absorbed")),
                                     ("hrm_lm, dense, one token", dataclasses.replace(tiny, experts=0, memory="cross", supervision_weight=0.0), True, {}),
                                     ("hrm_lm-mamba2", dataclasses.replace(tiny, encoder="mamba2", experts=0), True, {})):
        m = hrm_lm.HrmLm(c).to(S.device); m.init(None)
        with torch.no_grad():
            for p in m.parameters():
                p.add_(0.1 * torch.randn_like(p))
        text = torch.randint(1, c.vocab, (4, c.source + c.seq), device=S.device)
        rows = list(zip(*hrm_lm.window(text, c)))
        if padded:
            rows[0] = hrm_lm.pair(text[0, :c.source - 4], text[0, c.source:-2], c)
        fed = [*(torch.stack(y) for y in zip(*rows)), torch.full((1,), 0.7, device=S.device)]
        run = lambda: m(*fed)[0]
        loss = run()
        loss.backward()
        wanted = {n: p.grad for n, p in m.named_parameters() if p.requires_grad}
        m.zero_grad(set_to_none=True)
        with contextlib.ExitStack() as stack:
            for change in usual_hrm_lm.CHANGES + usual_hrm_lm.NO_PADDING * (not padded):
                stack.enter_context(mock.patch.object(*change))
            ours = run()
            ours.backward()
        say(name + ", usual", loss=worst(ours.detach(), loss.detach()), gradients=max(worst(p.grad, wanted[n]) for n, p in m.named_parameters() if p.requires_grad))
        m.zero_grad(set_to_none=True)
        stance = "force_eager" if S.low == torch.float32 and c.experts > 1 else "default"   # as above
        with mock.patch.dict(os.environ, {"TUNED_" + key: value for key, value in options.items()}), torch.compiler.set_stance(stance):
            rounded(name, m, run, HrmLmTraining(m, *fed, small=300), merged_hrm_lm)


def adapted_decoder(c):
    p = polychromic.Decoder(c).to(S.device); p.init(None)
    for n, w in p.named_parameters():
        if n.endswith("lora_b"):
            torch.nn.init.normal_(w, std=0.1)
        elif n.endswith("norm"):
            torch.nn.init.normal_(w, 1.0, 0.1)
        elif not n.endswith("lora_a"):
            torch.nn.init.normal_(w, std=0.2)
    return p


def polychromic_data(c):
    ids = torch.randint(2, c.vocab, (4, c.seq), device=S.device)
    targets = ids.roll(-1, 1)
    targets[:, :9] = -1
    return ids, torch.ones_like(ids, dtype=torch.bool), targets


def check_polychromic():
    c = dataclasses.replace(polychromic.TINY, replies=3)
    for name, cc in (("polychromic", c), ("polychromic untied, no qk_norm", dataclasses.replace(c, tied=False, qk_norm=False))):
        p = adapted_decoder(cc)
        ids, real, targets = polychromic_data(cc)
        base = Base(p)
        training = PolychromicTraining(base, ids, targets)
        rounded(name, p, lambda: p.supervised(ids, real, targets), training, adapters_of, base.update)
        # what was updated is what the next step computes with
        with torch.no_grad():
            for i, l in enumerate(p.layers):
                for g, group in enumerate((("q", "k", "v"), ("o",), ("gate", "up"), ("down",))):
                    for n, a in zip(group, base.p.value(f"{i}.{g}.a").chunk(len(group))):
                        getattr(l, n).lora_a.copy_(a)
                    rows = [len(getattr(l, n).lora_b) for n in group]
                    for j, (n, b) in enumerate(zip(group, base.p.value(f"{i}.{g}.b").split(rows))):
                        getattr(l, n).lora_b.copy_(b[:, j * cc.rank:(j + 1) * cc.rank])
        say(name + ", second", loss=worst(training.backward(), p.supervised(ids, real, targets).detach()))


def write(writer):
    for piece, times in writer.pieces():
        for _ in range(times):
            piece()


def check_writing():
    """generate: every written token against the reference's full forward, greedily (top_p tiny: the nucleus is one token), and the nucleus itself. Then sampling: many
    replies to one prompt, one token each, against the reference's probabilities (within the noise of so many draws). Then the step with replies."""
    c = dataclasses.replace(polychromic.TINY, replies=3)
    for name, cc in (("generate", c), ("generate untied, no qk_norm", dataclasses.replace(c, tied=False, qk_norm=False))):
        greedy = dataclasses.replace(cc, top_p=1e-6)
        p = adapted_decoder(greedy)
        base = Base(p)
        own = base.merged()
        base.merge(own)
        prompts = torch.randint(2, c.vocab, (c.prompts, 5), device=S.device)
        writer = Writer(base, prompts, own)
        write(writer)
        wanted, _, reply = polychromic.generate(p, prompts, torch.ones_like(prompts, dtype=torch.bool), greedy, -7, None)
        say(name, tokens_differ=(writer.ids != wanted).float().sum().item(), reply=(writer.reply != reply).float().sum().item())
    logits = torch.randn(3, 1500, device=S.device) * 3
    wanted = polychromic.top_p_filter(logits, 0.9, 0.9) > 0
    if option("KERNELS", "torch") == "torch" or not own_kernels():
        say("nucleus", differ=(nucleus(torch.softmax(logits / 0.9, -1), 0.9) != wanted).float().sum().item())
    else:
        import decode_kernels
        for low in (torch.float32, torch.bfloat16):   # in four passes and in two
            z = logits.to(low)
            if low != torch.float32:   # ties are all kept
                p = torch.softmax(z.float() / 0.9, -1)
                wanted = torch.stack([torch.stack([q[q > v].sum() < 0.9 for v in q]) for q in p])
            say("nucleus", differ=(decode_kernels.draw(z, torch.ones((), dtype=torch.int64, device=S.device), 0.9, 0.9, block=512, nucleus=True) != wanted).float().sum().item())

    p = adapted_decoder(c)
    base = Base(p)
    own = base.merged()
    base.merge(own)
    many = dataclasses.replace(c, prompts=1, replies=40000 if option("KERNELS", "torch") == "torch" or S.device == "cuda" else 200, new_tokens=1)
    p.c = base.c = many
    writer = Writer(base, prompts[:1], own)
    write(writer)
    with torch.no_grad():
        wanted = polychromic.top_p_filter(p.logits(p.hidden(prompts[:1], torch.ones(1, 5, dtype=torch.bool, device=S.device))[:, -1]), many.temperature, many.top_p)[0]
    seen = torch.bincount(writer.ids[:, -1], minlength=c.vocab) / many.replies
    noise = (wanted * (1 - wanted) / many.replies).sqrt()
    say("sampling", outside=((seen > 0) & (wanted == 0)).sum().item(), sigmas_over_5=max(0.0, ((seen - wanted).abs() / noise.clamp_min(1e-9))[wanted > 0].max().item() - 5))

    # supervised + policy gradient of what the writer wrote, twice (the baseline moves)
    p = adapted_decoder(c)
    base = Base(p)
    own = base.merged()
    base.merge(own)
    writer = Writer(base, prompts, own)
    write(writer)
    ids, real, targets = polychromic_data(c)
    baseline, whole = None, torch.ones_like(writer.ids, dtype=torch.bool)
    training = PolicyTraining(base, writer, ids, targets)
    def reference():
        nonlocal baseline
        with torch.no_grad():
            kept = [(n, n.scale) for l in p.layers for n in l.children()]
            for n, _ in kept:
                n.scale = 0.0
            e = p.hidden(writer.ids, whole)[:, prompts.shape[1]:].mean(1)
            for n, s in kept:
                n.scale = s
            score = polychromic.diversity(e.view(c.prompts, c.replies, -1))
            baseline = score.mean() if baseline is None else baseline
        loss = p.supervised(ids, real, targets) + c.weight * polychromic.polychromic_loss(p, writer.ids, whole, writer.reply, score, baseline)
        baseline = c.baseline_decay * baseline + (1 - c.baseline_decay) * score.mean()
        return loss
    rounded("polychromic-step", p, reference, training, adapters_of, False)
    write(writer)
    rounded("polychromic-step, second", p, reference, training, adapters_of, base.update)


def check_lior():
    c = lior.TINY
    e = lior.Encoder(c).to(S.device); e.init(None)
    with torch.no_grad():
        e.embedding.mul_(20)
    for how in ("sines", "steps"):
        os.environ["TUNED_FIELD"] = how
        a, b = (lior.State(c, torch.Generator().manual_seed(1)).to(S.device) for _ in "ab")
        errors = {}
        ids = torch.randint(0, c.vocab, (3, c.seq + 8), device=S.device)
        mask = torch.ones(3, c.seq, device=S.device); mask[1, 7:] = 0
        step = lior_step(e, b, ids, mask, c)
        for _ in range(8):   # the memory's ring wraps
            wanted, got = lior.train_window(e, a, ids, mask, c), step()
            for i, (k, w) in enumerate(wanted.items()):
                errors[k] = max(errors.get(k, 0), worst(got[i], w))
        real = lambda x: torch.view_as_real(x) if x.is_complex() else x
        for name in ("g", "theta", "field", "memory_coord", "memory_state"):
            errors[name] = worst(real(getattr(b, name)), real(getattr(a, name)))
        say(f"lior, {how}", **errors, still=0.0 if (a.g - 1).abs().max() > 1e-3 and a.theta.abs().max() > 1e-6 else 1.0)


def check_diversity():
    x = torch.randn(6, 5, 24, device=S.device)
    x[0, 1] = 0
    way = compiled(diversity)
    if option("KERNELS", "torch") == "own" and own_kernels():
        from diversity_kernel import diversity as way
    say("diversity", value=worst(way(x), polychromic.diversity(x)))


def exact_interpreter():
    """Triton's interpreter rounds to narrow types as PyTorch does: its own loses the carry of a mantissa that overflows."""
    from triton.runtime import interpreter
    types = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
    def convert(x, old, new, mode):
        found = torch.from_numpy(x.copy()).view(types[str(old)]).to(types[str(new)])
        return found.view({1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[found.element_size()]).numpy()
    interpreter._convert_float = convert


def check_fp8():
    """Decoders in FP8 beside the same in bf16: the loss, every gradient (relative to its norm, of which zeros would miss all), the rounding and the update."""
    if option("KERNELS", "torch") == "torch" or not own_kernels():
        return
    import plain
    if S.device == "cpu":
        exact_interpreter()
    low, S.low = S.low, torch.bfloat16
    far = lambda a, b: ((a.float() - b.float()).norm() / b.float().norm()).nan_to_num(nan=float("inf")).item()
    for name in ("gpt2-124m", "qwen2.5-0.5b"):
        s = plain.tiny(plain.SIZES[name])
        start, ids = plain.random_start(s), torch.randint(0, s.vocab, (s.batch, s.seq), device=S.device)
        start = {n: p * 5 if p.dim() == 2 else p for n, p in start.items()}
        make = lambda: plain.Training(s, {n: p.clone() for n, p in start.items()}, ids, ids.roll(-1, 1).contiguous())
        wide = make()
        os.environ["TUNED_FP8"] = "tensorwise"
        narrow = make()
        del os.environ["TUNED_FP8"]
        loss, grads = [t.backward() for t in (wide, narrow)], [t.p.named(t.p.gradients()) for t in (wide, narrow)]
        errors = dict(loss=abs(loss[1] / loss[0] - 1).item() / 100, gradients=max(far(grads[1][n], g) for n, g in grads[0].items()) / 3500)   # no more than 1%, and 35%
        # the same gradients through both optimizers: in f32, so that only the weights' narrow copies differ
        p, x = narrow.p, narrow.fp8.linear["0.up"]
        scale = narrow.fp8.scale[x.weight].clone()
        wide.p.grads = {n: g.clone() for n, g in grads[1].items()}
        wide.optimizer.step(), narrow.optimizer.step()
        errors["update"] = max(worst(p.value(n) - start[n], wide.p.value(n) - start[n]) for n in start) / 10
        wanted = (p.master["0.up"] * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        errors["rounding"] = far(x.w, wanted)
        errors["columns"] = float((x.wt.float() != x.w.float().t()).sum())
        errors["after"] = abs(narrow.backward() / wide.backward() - 1).item() / 100
        say(f"fp8, {name}", **errors)
    S.low = low


CHECKS = {"hydra": check_hydra, "vision_bdh": check_vision, "hrm": check_hrm, "hrm_lm": check_hrm_lm, "polychromic": check_polychromic, "generate": check_writing, "lior": check_lior, "diversity": check_diversity,
          "qwen2.5-1.5b": check_fp8}
OWN = ("vision_bdh", "hrm", "generate", "lior", "diversity", "qwen2.5-1.5b")   # what has kernels of its own


def check(names=()):
    """Prints a line for each; the exit status says whether all agree. TUNED_LOW=bfloat16 shows only that types fit."""
    S.device, S.low = option("DEVICE", "cpu"), getattr(torch, option("LOW", "float32"))
    torch.backends.cudnn.allow_tf32 = False
    os.environ["TUNED_CHUNK"] = "32"
    for kernels in ("torch", "own"):
        os.environ["TUNED_KERNELS"] = kernels
        if kernels == "own" and not own_kernels():
            print(json.dumps(dict(left_out="own kernels: TRITON_INTERPRET=1 runs them on a CPU, TUNED_DEVICE=cuda on a card")), flush=True)
            break
        for name in names or CHECKS:
            if kernels == "torch" or name in OWN:
                torch.manual_seed(0)
                CHECKS[name]()
    sys.exit(0 if OK else 1)
