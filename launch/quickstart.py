"""The quickstart's client: greedy text two ways, then a fork, a cut and a refused cut.

    quickstart.py ENDPOINT MODEL_DIRECTORY

The two loops must give the same text. The first runs the whole sequence at every step; the second keeps the cache, cuts it
by two tokens before every step, and feeds just these two.
"""
import json
import sys

import dskv

PROMPT = "Capital city of Germany:"
N_TOKENS = 10


def load_text(directory):
    """The model's tokenizer as (encode, decode), and what the text must name. Without the `tokenizers` package, ids stand
    for text, from the oracle beside the model."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        print("quickstart: ids are shown instead of text: the Python package `tokenizers` could not be installed")
        with open(f"{directory}/oracle.json", encoding="utf-8") as file:
            known = {row["prompt"]: row for row in json.load(file)}
        return lambda text: known[text]["input_ids"], str, str(known[PROMPT]["greedy"][0])
    tokenizer = Tokenizer.from_file(f"{directory}/tokenizer.json")
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False).replace("\n", "\\n")
    return lambda text: tokenizer.encode(text).ids, decode, " Berlin"


def without_cache(client, prompt):
    ids, computed = list(prompt), []
    for _ in range(N_TOKENS):
        result = client.forward(ids, argmax=True)
        computed.append(result.computed)
        ids.append(int(result.argmax[-1]))
    return ids, computed


def with_cut_cache(client, prompt):
    ids, computed, cache = list(prompt), [], None
    for _ in range(N_TOKENS):
        if cache is None:
            result = client.forward(ids, argmax=True)
        else:
            result = client.forward(ids[-2:], prefix=cache[: len(ids) - 2], argmax=True)
        cache = result.cache
        computed.append(result.computed)
        ids.append(int(result.argmax[-1]))
    return ids, computed


def main(endpoint, directory):
    encode, decode, city = load_text(directory)
    prompt = encode(PROMPT)
    with dskv.connect(endpoint) as client:
        info = client.info()
        print(f"quickstart: {info['family']} on {info['n_ranks']} ranks, {info['device']}")

        loops = {"whole sequence each step": without_cache, "last two tokens on a cut cache": with_cut_cache}
        texts = []
        for name, loop in loops.items():
            ids, computed = loop(client, prompt)
            texts.append(decode(ids))
            print(f"{name}: computed {computed}, {sum(computed)} tokens in all")
            print(f"text: {texts[-1]}")
        if texts[0] != texts[1]:
            raise SystemExit("quickstart: the two texts differ")
        if city not in texts[0]:
            raise SystemExit(f"quickstart: the text does not contain {city!r}")

        base = client.forward(prompt, argmax=True)
        for first in (int(base.argmax[-1]), ids[-1]):
            branch = client.generate([first], prefix=base.cache, max_tokens=4)
            print(f"fork: of one cache of {len(base.cache)} tokens: cached {branch.cached}, computed {branch.computed}: "
                  f"{decode(prompt + [first] + branch.tokens.tolist())}")

        cut = client.forward(prompt[3:], prefix=base.cache[:3], argmax=True)
        print(f"cut: to 3 tokens, then {len(prompt) - 3} again: cached {cut.cached}, computed {cut.computed}, "
              f"{'the same' if cut.argmax[-1] == base.argmax[-1] else 'another'} next token")
        if cut.argmax[-1] != base.argmax[-1]:
            raise SystemExit("quickstart: a cut cache gave another token")

        try:
            client.forward(prompt, prefix=base.cache[:999])
        except dskv.Error as error:
            print(f"refused cut: {error}")
        else:
            raise SystemExit("quickstart: a cut past the end was accepted")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
