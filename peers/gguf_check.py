#!/usr/bin/env python3
"""GGUF files beside what they were made from: gguf-py reads them, llama.cpp's converter makes its own, llama.cpp runs them.

    python3 peers/gguf_check.py --export 'kiln export {folder} --format gguf --type {type} --out {out}' \\
        --llama DIR [--library DIR] [--mistral DIR] [--work DIR] [--only NAME,..] [--keep]

For each case a small model with random weights is made with transformers. Then:
  tensors    gguf-py reads the file of each type: names as in its own table, shapes, numbers beside the source, bytes beside gguf.quants
  converter  llama.cpp's convert_hf_to_gguf.py makes a file of the same folder: every tensor's bytes and every key are compared
             (--llama is a source tree of llama.cpp)
  quantizer  llama.cpp's quantizer makes Q4_0 of the f32 file: types and bytes are compared
  tokens     llama.cpp splits texts as the package tokenizers does
  greedy     llama.cpp continues prompts as transformers does, and its logits are compared
             (--library is the folder of libllama.so; the package llama_cpp must be importable)
Vocabularies are those in llama.cpp's models/ folder, those of the package mistral_common (--mistral is its data/ folder), and some trained here.
"""
import argparse, ctypes, json, os, random, shlex, shutil, subprocess, sys, unicodedata
import numpy as np

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1).replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
          r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"

TEXTS = [
    "", " ", "  ", "\n", "\n\n", "\t\tindented\n   more\n\n\nlines  ", "Hello, world!", " Hello", "  two spaces", "I'll say it's we've, I'D, they'RE",
    "the year 2024 had 366 days, 12345678 and 3.14159", "über naïve café", "今天天气很好，我们去公园吧。", "Привет, как дела?", "مرحبا بالعالم", "नमस्ते दुनिया",
    "👩‍💻 emoji 🚀🚀 and ✅", "def f(x):\n    return x ** 2  # square\n", "a" * 50, "aaaa bbbb    cccc        dddd", "x = {'k': [1, 2, (3, 4)]};", "\r\nwindows\r\n", "한국어 문장입니다.",
    "MixedCASE wordsLikeThis and SHOUTING", "e-mail: someone@example.org, https://example.org/a?b=c&d=e#f", "\u00a0nbsp\u3000wide", "tab\tin\tside", "½ ² Ⅳ ٣ ๓", "don''t ... !!! ???", "ﬁ ligature Å",
] + ["x" + " " * n + "y" for n in range(2, 80)]


# ---------------------------------------------------------------- tokenizers
def from_vocab(path, split, ignore_merges=False, digits=False, bos=None, normalizer=None, most=None):
    """A byte-level tokenizer.json of the tokens and merges (or the `most` first tokens) in one of llama.cpp's vocabulary files."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    tokens, kinds, merges, _ = read_vocab(path)
    special = [(i, t) for i, t in enumerate(tokens) if kinds[i] in (3, 4)]
    last = max(i for i, kind in enumerate(kinds) if kind == 1)
    vocab = {t: i for i, t in enumerate(tokens) if i < (most or last + 1)}
    merges = [tuple(m.split(" ")) for m in merges]
    # Some of these files list merges whose whole is no token.
    merges = [m for m in merges if m[0] in vocab and m[1] in vocab and m[0] + m[1] in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if most:
        special = [(most + n, text) for n, (_, text) in enumerate(t for t in special if t[0] >= most)]
        kinds = {i: 3 for i, _ in special}
        assert sorted(vocab.values()) == list(range(most))
    add_special(tokenizer, special, kinds)
    first = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split == "bytelevel":
        last = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        last = [pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    parts = first + last
    tokenizer.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos:
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def add_special(tokenizer, special, kinds):
    """Added tokens get the ids that they have in the file; ids are given in order, so holes are filled with unused names."""
    from tokenizers import AddedToken
    at = tokenizer.get_vocab_size(with_added_tokens=True)
    for i, text in special:
        known = tokenizer.token_to_id(text)
        if known is None:
            assert i >= at, (i, at, text)
            for hole in range(at, i):
                tokenizer.add_special_tokens([AddedToken(f"<|hole_{hole}|>", special=True)])
            at = i + 1
        add = tokenizer.add_special_tokens if kinds[i] == 3 else tokenizer.add_tokens
        add([AddedToken(text, special=kinds[i] == 3, normalized=False)])
        assert tokenizer.token_to_id(text) == i, (text, i, tokenizer.token_to_id(text))


def read_vocab(path):
    from gguf import GGUFReader
    fields = GGUFReader(path).fields
    texts = lambda key: [bytes(fields[key].parts[i]).decode("utf-8") for i in fields[key].data] if key in fields else []
    numbers = lambda key: [fields[key].parts[i][0] for i in fields[key].data] if key in fields else []
    g = "tokenizer.ggml."
    return texts(g + "tokens"), [int(n) for n in numbers(g + "token_type")], texts(g + "merges"), [float(n) for n in numbers(g + "scores")]


def sentencepiece(path, metaspace):
    """Llama 2's tokenizer.json: its merges are all pairs whose whole is a token, by the whole's score, as transformers makes them."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    tokens, kinds, _, scores = read_vocab(path)
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token, i in vocab.items():
        if kinds[i] == 1:
            pairs = [(token[:n], token[n:]) for n in range(1, len(token)) if token[:n] in vocab and token[n:] in vocab]
            merges += [(-scores[i], vocab[a], vocab[b], (a, b)) for a, b in pairs]
    merges = [m[-1] for m in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=metaspace, split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    add_special(tokenizer, [(i, tokens[i]) for i in range(3)], {0: 3, 1: 3, 2: 3})
    return tokenizer


def mistral(path):
    """A SentencePiece model of the package mistral_common, as transformers converts it."""
    import tempfile, transformers
    with tempfile.TemporaryDirectory() as d:
        shutil.copy(path, os.path.join(d, "tokenizer.model"))
        names = dict(tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>", unk_token="<unk>", add_bos_token=True)
        json.dump(names, open(os.path.join(d, "tokenizer_config.json"), "w"))
        return transformers.AutoTokenizer.from_pretrained(d).backend_tokenizer


def tekken(path, most):
    """The first tokens of a tekken.json: a token's merges are all pairs that make it, by its rank."""
    import base64
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    found = json.load(open(path))
    assert found["config"]["pattern"] == TEKKEN
    # Bytes as the letters that byte-level tokenizers have for them.
    plain = [*range(0x21, 0x7f), *range(0xa1, 0xad), *range(0xae, 0x100)]
    letters = {b: chr(b) for b in plain} | {b: chr(0x100 + n) for n, b in enumerate(b for b in range(256) if b not in plain)}
    tokens = [base64.b64decode(t["token_bytes"]) for t in found["vocab"][:most]]
    rank, named = {t: i for i, t in enumerate(tokens)}, lambda t: "".join(letters[b] for b in t)
    pairs = [(i, rank[t[:n]], rank[t[n:]]) for i, t in enumerate(tokens) for n in range(1, len(t)) if t[:n] in rank and t[n:] in rank]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocab = {t: i for i, t in enumerate(special)} | {named(t): i + len(special) for i, t in enumerate(tokens)}
    merges = [(named(tokens[a]), named(tokens[b])) for _, a, b in sorted(pairs)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(TEKKEN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def trained(split, ignore_merges=False, byte_fallback=False, size=900):
    """A tokenizer trained on generated words."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    draw = random.Random(1)
    syllables = [a + b for a in "bdfgklmnprstvzщлня" for b in ("a", "e", "i", "o", "u", "an", "er", "ü", "о")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(400)]
    styles = [str.lower, str.capitalize, str.upper]
    text = [" ".join(draw.choice(styles)(draw.choice(words)) + draw.choice(["", "", ",", "'s", ".", " 17", "\n"]) for _ in range(40)) for _ in range(300)]
    if byte_fallback:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁[^▁]*"), "isolated")   # for training only: whole texts have no words to count
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)], show_progress=False)
        tokenizer.train_from_iterator(text, trainer)
        made = json.loads(tokenizer.to_str())
        made["added_tokens"] = made["added_tokens"][:3]
        made["pre_tokenizer"] = None
        made["decoder"] = json.loads(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]).__getstate__())
        return Tokenizer.from_str(json.dumps(made))
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if split == "bytelevel":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


# ---------------------------------------------------------------- cases
def cases(vocabs, data):
    v = lambda name: os.path.join(vocabs, f"ggml-vocab-{name}.gguf")
    small = dict(hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256)
    llama3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    gpt2 = dict(n_embd=96, n_head=4, n_layer=2, n_positions=128, n_ctx=128)   # n_ctx: llama.cpp's converter asks for it
    end = dict(eos_token="<|endoftext|>")
    llama3_names = dict(bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>")
    s = dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    of_mistral = {
        "mistral-v1": ("Mistral", dict(small, sliding_window=None), lambda: mistral(os.path.join(data, "tokenizer.model.v1")), s, "default"),
        "mistral-v3": ("Mistral", dict(small, sliding_window=None), lambda: mistral(os.path.join(data, "mistral_instruct_tokenizer_240323.model.v3")), s, "default"),
        "mistral-tekken": ("Mistral", dict(small, sliding_window=None, head_dim=32), lambda: tekken(os.path.join(data, "tekken_240718.json"), 20000), s, "tekken"),
    } if data else {}
    return of_mistral | {
        # name: config class, its arguments, tokenizer (or None: bytes), names of tokens, the expected tokenizer.ggml.pre
        "gpt2": ("GPT2", gpt2, lambda: from_vocab(v("gpt-2"), "bytelevel"), dict(end, bos_token="<|endoftext|>", unk_token="<|endoftext|>"), "gpt-2"),
        "gpt2-odd-rows": ("GPT2", dict(gpt2, n_embd=80, n_inner=96, tie_word_embeddings=False), lambda: trained("bytelevel"), end, "gpt-2"),
        "llama3": ("Llama", dict(small, head_dim=32, rope_parameters=llama3), lambda: from_vocab(v("llama-bpe"), LLAMA3, True, bos="<|begin_of_text|>"), llama3_names, "llama-bpe"),
        "llama3-merges": ("Llama", dict(small, tie_word_embeddings=True), lambda: from_vocab(v("llama-bpe"), LLAMA3, most=20000), llama3_names, "smaug-bpe"),
        "llama2": ("Llama", dict(small, num_key_value_heads=6, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0)), lambda: sentencepiece(v("llama-spm"), None), s, "default"),
        "llama-biases": ("Llama", dict(small, attention_bias=True, mlp_bias=True), lambda: trained(QWEN2), end, "qwen2"),
        "smollm": ("Llama", dict(small, tie_word_embeddings=True), lambda: from_vocab(v("starcoder"), "bytelevel", digits=True), end, "smollm"),
        "mistral": ("Mistral", dict(small, sliding_window=128), lambda: sentencepiece(v("llama-spm"), "first"), s, "default"),
        "qwen2": ("Qwen2", dict(small, tie_word_embeddings=True, rope_parameters=dict(rope_type="default", rope_theta=1e6)), lambda: from_vocab(v("qwen2"), QWEN2, normalizer=True), dict(end, pad_token="<|endoftext|>"), "qwen2"),
        "qwen3": ("Qwen3", dict(small, head_dim=32, tie_word_embeddings=False), lambda: from_vocab(v("qwen2"), QWEN2, most=20000), dict(end, eos_token="<|im_end|>"), "qwen2"),
        "qwen3-marks": ("Qwen3", dict(small, head_dim=32, tie_word_embeddings=True), lambda: from_vocab(v("qwen35"), QWEN35, most=20000), end, "qwen35"),
        "qwen3-bytes": ("Qwen3", dict(small, head_dim=16, vocab_size=256, tie_word_embeddings=True), None, {}, "gpt-2"),
        "llama-trained-fallback": ("Llama", dict(small), lambda: trained(None, byte_fallback=True), s, "default"),
    }


def make(folder, case, seed):
    """A folder as transformers saves it."""
    import torch, transformers
    transformers.utils.logging.disable_progress_bar()
    cls, arguments, tokenizer, names, _ = case
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    rows = arguments.get("vocab_size", 0)
    ids = {}
    if tokenizer:
        tokenizer = tokenizer()
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        json.dump(dict(names, tokenizer_class="PreTrainedTokenizerFast", chat_template=CHAT), open(os.path.join(folder, "tokenizer_config.json"), "w"))
        # Embeddings often have more rows than there are tokens.
        rows = tokenizer.get_vocab_size() + 7
        ids = {k.replace("_token", "_token_id"): tokenizer.token_to_id(t) for k, t in names.items() if k in ("bos_token", "eos_token")}
    ids = dict(dict(bos_token_id=None, eos_token_id=None), **ids)
    # Weights large enough that tokens differ in their logits.
    config = getattr(transformers, cls + "Config")(**dict(arguments, vocab_size=rows, initializer_range=0.2, **ids))
    torch.manual_seed(seed)
    model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(cls, cls + "ForCausalLM"))(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn_like(p) * 0.1 + (1.0 if "norm" in name or "ln_" in name and name.endswith("weight") else 0.0))
    model.save_pretrained(folder)
    return model, tokenizer


# ---------------------------------------------------------------- checks
FAILED = []


def check(ok, what):
    if not ok:
        FAILED.append(what)
        print(f"  FAILED: {what}", flush=True)
    return ok


def source(folder):
    """The weights as they should lie in the file: by gguf-py's table of names, in llama.cpp's order of rows."""
    import gguf
    from safetensors.numpy import load_file
    config = json.load(open(os.path.join(folder, "config.json")))
    kind = config["model_type"]
    arch = {"gpt2": gguf.MODEL_ARCH.GPT2, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}.get(kind, gguf.MODEL_ARCH.LLAMA)
    table = gguf.get_tensor_name_map(arch, config.get("num_hidden_layers", config.get("n_layer")))
    expected = {}
    for name, w in load_file(os.path.join(folder, "model.safetensors")).items():
        heads = config["num_attention_heads"] if ".q_proj." in name else config["num_key_value_heads"] if ".k_proj." in name else 0
        if heads and arch == gguf.MODEL_ARCH.LLAMA:
            w = w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            w = w.T
        expected[table.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(w)
    return expected


def fields(path):
    from gguf import GGUFReader
    reader = GGUFReader(path)
    return reader, {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}


def check_tensors(name, folder, paths):
    from gguf import GGMLQuantizationType as T, GGUFReader, quants
    expected = source(folder)
    for kind in TYPES:
        reader = GGUFReader(paths[kind])
        found = {t.name: t for t in reader.tensors}
        extra = {"rope_freqs.weight"} & set(found)
        check(set(found) - extra == set(expected), f"{name} {kind}: names {set(found) ^ set(expected)}")
        worst, exact, short = 0.0, 0, 0
        logits = "output.weight" if "output.weight" in expected else "token_embd.weight"
        for n, w in expected.items():
            t = found[n]
            want = T.F32 if w.ndim < 2 or n == "position_embd.weight" else T[kind.upper()]
            if want in (T.Q8_0, T.Q4_0) and w.shape[-1] % 32:
                want, short = T.F16, short + 1
            elif want == T.Q4_0 and n == logits:
                want = T.Q8_0
            check(t.tensor_type == want, f"{name} {kind}: {n} is {t.tensor_type.name}, not {want.name}")
            check(tuple(reversed([int(d) for d in t.shape])) == w.shape, f"{name} {kind}: {n} is {t.shape}, not {w.shape}")
            check(int(t.data_offset) % 32 == 0, f"{name} {kind}: {n} is not aligned")
            same = np.array_equal(np.asarray(t.data).view(np.uint8).ravel(), quants.quantize(w, want).view(np.uint8).ravel())
            check(same, f"{name} {kind}: {n} differs from gguf.quants")
            exact += same
            back = quants.dequantize(t.data, t.tensor_type).reshape(w.shape).astype(np.float32)
            worst = max(worst, float(np.abs(back - w).max() / np.abs(w).max()))
        limit = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.6 / 127, "q4_0": 1 / 8}[kind]
        check(worst <= limit, f"{name} {kind}: error {worst}")
        print(f"  tensors {kind:5} {exact} of {len(expected)} equal gguf.quants bit for bit, {short} in f16 for short rows, worst error {worst:.2e} of a tensor's largest", flush=True)


def check_converter(name, folder, paths, llama, ours, keys):
    """llama.cpp's converter on the same folder. It names a pre-tokenizer by a hash that only published tokenizers have."""
    from gguf import GGUFReader
    env = dict(os.environ, PYTHONPATH=os.path.join(llama, "gguf-py"))
    for kind in ["f32", "q8_0"]:
        theirs = paths[kind] + ".theirs"
        command = [sys.executable, os.path.join(llama, "convert_hf_to_gguf.py"), folder, "--outfile", theirs, "--outtype", kind]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        if done.returncode:
            print(f"  converter cannot: {done.stderr.strip().splitlines()[-1][:150]}")
            return
        same, all = compare(f"{name} {kind}: beside the converter's", ours if kind == "f32" else GGUFReader(paths[kind]), GGUFReader(theirs))
        print(f"  converter {kind}: {same} of {all} tensors the same")
        if kind == "f32":
            other = fields(theirs)[1]
            for k in sorted(keys.keys() | other.keys()):
                if keys.get(k) != other.get(k):
                    print(f"    key {k}: {short(keys.get(k))} here, {short(other.get(k))} there")
        os.remove(theirs)


def compare(what, a, b):
    a, b = ({t.name: t for t in r.tensors} for r in (a, b))
    equal = 0
    for n in a.keys() | b.keys():
        same = n in a and n in b and a[n].tensor_type == b[n].tensor_type
        # f32 exponents there, f64 here.
        equals = np.allclose if n == "rope_freqs.weight" else np.array_equal
        equal += check(same and equals(a[n].data, b[n].data), f"{what}: {n}")
    return equal, len(b)


def check_quantizer(name, paths):
    """llama.cpp's quantizer on the f32 file, with Q8_0 for the logits."""
    import llama_cpp as c
    from gguf import GGUFReader
    p = c.llama_model_quantize_default_params()
    p.ftype, p.nthread, p.output_tensor_type = 2, 1, 8
    theirs = paths["q4_0"] + ".theirs"
    check(c.llama_model_quantize(paths["f32"].encode(), theirs.encode(), p) == 0, f"{name}: the quantizer")
    a, b = ({t.name: t for t in GGUFReader(path).tensors} for path in (paths["q4_0"], theirs))
    os.remove(theirs)
    bytes_off = total = 0
    for n, t in b.items():
        if check(a[n].tensor_type == t.tensor_type, f"{name}: {n} is {a[n].tensor_type.name}, the quantizer's {t.tensor_type.name}"):
            bytes_off += int((a[n].data.view(np.uint8) != t.data.view(np.uint8)).sum())
            total += t.data.nbytes
    check(bytes_off == 0, f"{name}: {bytes_off} of {total} bytes differ from the quantizer's")
    print(f"  quantizer q4_0: the same types, {bytes_off} of {total} bytes differ")


def short(value):
    if isinstance(value, list):
        return f"[{len(value)}: {str(value[:4])[1:60]}..]"
    return str(value)[:60]


class Llama:
    """A file in llama.cpp, on the CPU, with an f32 KV cache."""

    def __init__(self, path):
        import llama_cpp as c
        self.c = c
        p = c.llama_model_default_params()
        p.use_mmap = False
        self.model = c.llama_model_load_from_file(path.encode(), p)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.vocab = c.llama_model_get_vocab(self.model)
        p = c.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_threads, p.n_threads_batch = 128, 128, 1, 1
        p.type_k = p.type_v = 0   # f32
        p.flash_attn_type = 0
        self.context = c.llama_init_from_model(self.model, p)
        self.rows = c.llama_vocab_n_tokens(self.vocab)

    def tokens(self, text, special):
        data = text.encode()
        room = (self.c.llama_token * (len(data) + 16))()
        n = self.c.llama_tokenize(self.vocab, data, len(data), room, len(room), special, special)
        return list(room[:n])

    def logits(self, ids):
        """Of the position after these, which continue what was there."""
        array = (self.c.llama_token * len(ids))(*ids)
        assert self.c.llama_decode(self.context, self.c.llama_batch_get_one(array, len(ids))) == 0
        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (self.rows,)).copy()

    def clear(self):
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def close(self):
        self.c.llama_free(self.context)
        self.c.llama_model_free(self.model)


def check_tokens(name, llama, tokenizer, names):
    """Plain, and with special tokens added and looked for."""
    ids = lambda text, special: tokenizer.encode(text, add_special_tokens=special).ids if tokenizer else list(text.encode())
    special = [t.replace("END", names["eos_token"]) for t in ("ENDHelloEND there", "END END", "aEND\nENDb")] if names else []
    draw = random.Random(7)
    letters = [*"abcdeEFG       \n\n\t123.,;:!?'''-_()[]{}<>/\\\"#@$%^&*+=|~`éß中文дЖاहि한😀\u200d\u00a0²…"]
    drawn = ["".join(draw.choices(letters, k=draw.randint(1, 60))) for _ in range(400)]
    for what, texts, flags in [("texts", TEXTS, (False, True)), ("texts with special tokens", special, (True,)), ("random texts", drawn, (False,))]:
        differ = [(t, f) for t in texts for f in flags if ids(t, f) != llama.tokens(t, f)]
        print(f"  tokens  {len(texts) * len(flags) - len(differ)} of {len(texts) * len(flags)} {what} the same")
        for text, flag in differ[:3]:
            a, b = ids(text, flag), llama.tokens(text, flag)
            at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            show = lambda ids: [tokenizer.id_to_token(i) for i in ids[at:at + 4]]
            print(f"    {text[:70]!r}: tokenizers {show(a)}, llama.cpp {show(b)}")
        known = [t for t, _ in differ if name in EXPECTED and EXPECTED[name](t)]
        if known:
            print(f"    {len(known)} of {len(differ)} as the export's notes say")
        check(len(known) == len(differ), f"{name}: {len(differ) - len(known)} {what} are split otherwise")


def check_greedy(name, llama, model, prompts, steps=24):
    import torch
    equal, worst, margin = 0, 0.0, np.inf
    for ids in prompts:
        llama.clear()
        theirs, ours = list(ids), list(ids)
        ours_logits = llama.logits(ids)
        for _ in range(steps):
            with torch.no_grad():
                reference = model(torch.tensor([theirs])).logits[0, -1].double().numpy()
            worst = max(worst, float(np.abs(reference - ours_logits).max() / np.abs(reference).max()))
            top = np.sort(reference)[-2:]
            margin = min(margin, float((top[1] - top[0]) / np.abs(reference).max()))
            theirs.append(int(reference.argmax()))
            ours.append(int(ours_logits.argmax()))
            if theirs != ours:
                break
            ours_logits = llama.logits(ours[-1:])
        equal += theirs == ours
    distinct = len(set(ours[len(ids):]))
    check(equal == len(prompts), f"{name}: {equal} of {len(prompts)} continuations the same")
    # ggml looks GELU up in a table of f16.
    check(worst < (2e-3 if name.startswith("gpt2") else 2e-4), f"{name}: logits differ by {worst}")
    print(f"  greedy  {equal} of {len(prompts)} continuations of {steps} tokens the same ({distinct} distinct tokens in the last); logits differ by {worst:.1e} at most, the best two are {margin:.1e} apart at least")


def run(name, case, a, seed):
    print(name, flush=True)
    folder = os.path.join(a.work, name)
    model, tokenizer = make(folder, case, seed)
    paths = {}
    for kind in TYPES:
        paths[kind] = os.path.join(a.work, f"{name}-{kind}.gguf")
        if os.path.exists(paths[kind]):
            os.remove(paths[kind])
        done = subprocess.run(shlex.split(a.export.format(folder=folder, out=paths[kind], type=kind)), capture_output=True, text=True)
        if not check(done.returncode == 0, f"{name} {kind}: {done.stderr.strip()}"):
            return
        if kind in ("f32", "q4_0"):
            print("  " + done.stdout.strip().replace("\n", "\n  "), flush=True)
    check_tensors(name, folder, paths)
    ours, keys = fields(paths["f32"])
    check(keys["tokenizer.ggml.pre"] == case[-1], f"{name}: pre is {keys['tokenizer.ggml.pre']}, not {case[-1]}")
    check_converter(name, folder, paths, a.llama, ours, keys)
    if a.library:
        llama = Llama(paths["f32"])
        check(llama.rows == model.config.vocab_size, f"{name}: {llama.rows} tokens")
        check_tokens(name, llama, tokenizer, case[3])
        draw = random.Random(seed)
        prompts = [[draw.randrange(model.config.vocab_size - 7) for _ in range(n)] for n in (1, 5, 40, 70)]
        check_greedy(name, llama, model, prompts)
        llama.close()
        # Its process aborts where it is told to make blocks of rows that are too short.
        if name != "gpt2-odd-rows":
            check_quantizer(name, paths)
        for kind in TYPES[1:]:
            quantised = Llama(paths[kind])
            reference, found = (np.asarray(x, np.float64) for x in (next_logits(model, prompts[2]), quantised.logits(prompts[2])))
            print(f"  llama.cpp runs {kind}: logits correlate with f32's by {np.corrcoef(reference, found)[0, 1]:.5f}")
            # Random weights let small errors grow: for four bits the bytes beside the quantizer's have to do.
            check(np.corrcoef(reference, found)[0, 1] > {"q4_0": 0.3, "q8_0": 0.98}.get(kind, 0.999), f"{name}: {kind} in llama.cpp")
            quantised.close()
    if not a.keep:
        for path in paths.values():
            os.remove(path)


def next_logits(model, ids):
    import torch
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].numpy()


# Texts that llama.cpp splits otherwise, as a note of the export says: a second space before one that begins with a space, one after a special token;
# combining marks in Tekken's regex.
metaspace = lambda text: text.startswith(" ") or "</s>" in text
marks = lambda text: any(unicodedata.category(c).startswith("M") for c in text)
EXPECTED = {"mistral": metaspace, "mistral-v1": metaspace, "mistral-v3": metaspace, "mistral-tekken": marks}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--export", required=True)
    p.add_argument("--llama", required=True)
    p.add_argument("--mistral")
    p.add_argument("--library")
    p.add_argument("--work", default="gguf-check")
    p.add_argument("--only")
    p.add_argument("--keep", action="store_true", help="leaves the GGUF files")
    a = p.parse_args()
    if a.library:
        os.environ["LLAMA_CPP_LIB_PATH"] = os.path.abspath(a.library)
        import llama_cpp
        llama_cpp.llama_backend_init()
        quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    found = cases(os.path.join(a.llama, "models"), a.mistral)
    for i, (name, case) in enumerate(found.items()):
        if not a.only or name in a.only.split(","):
            run(name, case, a, 100 + i)
    print(f"{len(FAILED)} checks failed" + "".join(f"\n  {f}" for f in FAILED))
    sys.exit(bool(FAILED))


if __name__ == "__main__":
    main()
