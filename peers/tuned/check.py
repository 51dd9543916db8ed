"""Each recipe at TINY size on the CPU: the eager reference beside the tuned code."""
import dataclasses, json, os, sys
import torch
from common import S, compiled, option, trainable, trainer
from adapters import Writer, diversity, merge_lora, merged_base, nucleus, policy_step, polychromic_step
from geometry import lior_step
from language import hydra_step
from puzzles import hrm_step
from vision import vision_step
import hrm, hydra, lior, polychromic, vision_bdh


def check():
    """Each recipe at TINY size, eager reference beside traced tuned code, fp32 on the CPU. Raises nothing: prints a line for each, and the exit status says whether all agree."""
    S.device, S.low, S.chunk = "cpu", getattr(torch, option("LOW", "float32")), 32   # TUNED_LOW=bfloat16: shows only that types fit
    torch.manual_seed(0)
    # What is no number counts as infinitely wrong: Python's max would drop it.
    worst, ok = lambda a, b: ((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).nan_to_num(nan=float("inf")).item(), True

    def say(name, **errors):
        nonlocal ok
        good = all(e == e and e < 1e-4 for e in errors.values())
        ok &= good
        print(json.dumps(dict(check=name, ok=good, **{k: float(f"{e:.1e}") for k, e in errors.items()})), flush=True)

    def gradients(name, m, reference, backward):
        loss = reference()
        loss.backward()
        wanted = {n: p.grad for n, p in m.named_parameters() if p.requires_grad}
        m.zero_grad(set_to_none=True)
        ours = backward()
        missing = [n for n, p in m.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing, missing
        params = trainable(m)
        errors = dict(loss=worst(ours, loss.detach()), gradients=max(worst(p.grad, wanted[n]) for n, p in m.named_parameters() if p.requires_grad))
        # the update: the same gradients (ten times larger, so that the clip works) through clip_grad_norm_ and plain AdamW
        before = [p.detach().clone() for p in params]
        twins = [torch.nn.Parameter(p.clone()) for p in before]
        for p, q in zip(params, twins):
            p.grad = 10 * p.grad
            q.grad = p.grad.clone()
        torch.nn.utils.clip_grad_norm_(twins, 1.0)
        torch.optim.AdamW(twins, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1).step()
        trainer(params)()
        say(name, **errors, update=max(worst(1e4 * (p.detach() - o), 1e4 * (q.detach() - o)) for p, q, o in zip(params, twins, before)) / 10)

    c = dataclasses.replace(hydra.TINY, seq=40)
    m = hydra.Hydra(c); m.init(None)
    ids = torch.randint(0, c.vocab, (3, c.seq))
    targets = ids.roll(-1, 1).contiguous(); targets[0, :7] = -1
    gradients("hydra", m, lambda: m(ids, targets)[0], hydra_step(m, ids, targets))

    c = vision_bdh.TINY
    v = vision_bdh.VisionBdh(c); v.init(None)
    images, labels = torch.randn(5, 3, c.image, c.image), torch.randint(0, c.classes, (5,))
    gradients("vision_bdh", v, lambda: v(images, labels)[0], vision_step(v, images, labels, 2))

    c = dataclasses.replace(hrm.TINY, layers=2)
    h = hrm.Hrm(c); h.init(None)
    torch.nn.init.normal_(h.halt, std=0.1)
    ids, targets = torch.randint(1, 11, (6, c.seq)), torch.randint(2, 11, (6, c.seq))
    targets[0] = -1
    with torch.compiler.set_stance("force_eager" if S.low == torch.float32 else "default"):   # 2.11 traces grouped products in bf16 alone
        gradients("hrm", h, lambda: h(h.start(6, S.device), ids, targets)[1], hrm_step(h, h.start(6, S.device), ids, targets))

    c = dataclasses.replace(polychromic.TINY, replies=3)
    def decoder(c):
        p = polychromic.Decoder(c); p.init(None)
        for n, w in p.named_parameters():
            if n.endswith("lora_b"):
                torch.nn.init.normal_(w, std=0.1)
            elif n.endswith("norm"):
                torch.nn.init.normal_(w, 1.0, 0.1)
            elif not n.endswith("lora_a"):
                torch.nn.init.normal_(w, std=0.2)
        return p
    for name, cc in (("polychromic", c), ("polychromic untied, no qk_norm", dataclasses.replace(c, tied=False, qk_norm=False))):
        p = decoder(cc)
        ids = torch.randint(2, c.vocab, (4, c.seq))
        real, targets = torch.ones_like(ids, dtype=torch.bool), ids.roll(-1, 1)
        targets[:, :9] = -1
        gradients(name, p, lambda: p.supervised(ids, real, targets), polychromic_step(merged_base(p), ids, targets))

    # generate: logits of every written token against the reference's full forward, greedily (top_p tiny: the nucleus is one token), and the nucleus itself
    greedy = dataclasses.replace(c, top_p=1e-6)
    p = decoder(greedy)
    base = merged_base(p)
    own = [w[:4] + tuple(y.clone() for y in w[4:]) for w in base.layers]
    prompts = torch.randint(2, c.vocab, (c.prompts, 5))
    with torch.no_grad():
        merge_lora(base.layers, base, own)
    write = lambda w: [f() for f, n in w.pieces() for _ in range(n)]
    writer = Writer(base, prompts, own)
    write(writer)
    wanted, _, reply = polychromic.generate(p, prompts, torch.ones_like(prompts, dtype=torch.bool), greedy, -7, None)
    logits = torch.randn(7, 5000) * 3
    probabilities = torch.softmax(logits / 0.9, -1)
    kept = nucleus(probabilities, 0.9)
    say("generate", tokens_differ=(writer.ids != wanted).float().sum().item(), reply=(writer.reply != reply).float().sum().item(),
        nucleus=(kept != (polychromic.top_p_filter(logits, 0.9, 0.9) > 0)).float().sum().item())

    # sampling: many replies to one prompt, one token each, against the reference's probabilities (total variation, within the noise of so many draws)
    many = dataclasses.replace(c, prompts=1, replies=40000, new_tokens=1)
    p.c = base.c = many
    writer = Writer(base, prompts[:1], own)
    write(writer)
    with torch.no_grad():
        wanted = polychromic.top_p_filter(p.logits(p.hidden(prompts[:1], torch.ones(1, 5, dtype=torch.bool))[:, -1]), many.temperature, many.top_p)[0]
    seen = torch.bincount(writer.ids[:, -1], minlength=c.vocab) / many.replies
    noise = (wanted * (1 - wanted) / many.replies).sqrt()
    say("sampling", outside=((seen > 0) & (wanted == 0)).sum().item(), sigmas_over_5=max(0.0, ((seen - wanted).abs() / noise.clamp_min(1e-9))[wanted > 0].max().item() - 5))
    p.c = base.c = c

    # polychromic-step: supervised + policy gradient of what the writer wrote, twice (the baseline moves)
    writer = Writer(base, prompts, own)
    write(writer)
    real, baseline = torch.ones_like(ids, dtype=torch.bool), None
    whole = torch.ones_like(writer.ids, dtype=torch.bool)
    step = policy_step(base, writer, ids, targets)
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
    gradients("polychromic-step", p, reference, step)
    write(writer)
    gradients("polychromic-step, second", p, reference, step)

    c = lior.TINY
    e = lior.Encoder(c); e.init(None)
    with torch.no_grad():
        e.embedding.mul_(20)
    for how in ("sines", "steps"):
        os.environ["TUNED_FIELD"] = how
        generator = torch.Generator().manual_seed(1)
        a = lior.State(c, generator)
        b = lior.State(c, generator.manual_seed(1))
        errors = {}
        ids = torch.randint(0, c.vocab, (3, c.seq + 8))
        mask = torch.ones(3, c.seq); mask[1, 7:] = 0
        step = lior_step(e, b, ids, mask, c)
        for _ in range(8):   # the memory's ring wraps
            wanted, got = lior.train_window(e, a, ids, mask, c), step()
            for i, (k, w) in enumerate(wanted.items()):
                errors[k] = max(errors.get(k, 0), worst(got[i], w))
        real = lambda x: torch.view_as_real(x) if x.is_complex() else x
        for name in ("g", "theta", "field", "memory_coord", "memory_state"):
            errors[name] = worst(real(getattr(b, name)), real(getattr(a, name)))
        say(f"lior, {how}", **errors, still=0.0 if (a.g - 1).abs().max() > 1e-3 and a.theta.abs().max() > 1e-6 else 1.0)

    x = torch.randn(6, 5, 16)
    x[0, 1] = 0
    say("diversity", value=worst(compiled(diversity)(x), polychromic.diversity(x)))
    sys.exit(0 if ok else 1)
