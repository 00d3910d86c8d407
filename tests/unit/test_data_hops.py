"""The corpus of pointer chasing: one cycle a document, true answers, and where they stand."""

import re
from collections import Counter

import numpy as np
import pytest

from alcoda.data.batches import Batches
from alcoda.data.config import DataConfig
from alcoda.data.corpora import corpus
from alcoda.data.hops import answers
from alcoda.data.prepare import prepare
from alcoda.data.vocabulary import Bpe
from alcoda.errors import UsageError


def documents(spec, max_bytes=None):
    return list(corpus(spec).documents(max_bytes))


def links_of(text):
    return dict(link.split() for link in text.removeprefix("hops:").split("?")[0].split(";"))


def questions_of(text):
    return [(a, int(h), b) for h, a, b in re.findall(r"\? (\d+) ([A-Z]) ([A-Z])", text)]


def test_a_document_is_one_cycle_and_every_answer_follows_from_it():
    """Walked here link by link, apart from the code that makes the text."""
    for text in documents("hops:nodes=12,hops=11,queries=30,docs=300"):
        links, asked = links_of(text), questions_of(text)
        node, seen = "A", []
        for _ in range(12):
            seen.append(node)
            node = links[node]
        assert node == "A" and sorted(seen) == sorted(links) == list("ABCDEFGHIJKL")
        assert len(asked) == len(set(asked)) == 30
        for start, hops, end in asked:
            node = start
            for _ in range(hops):
                node = links[node]
            assert node == end != start
        starts = Counter(start for start, _, _ in asked[:24])
        assert set(starts.values()) == {2}  # each is asked from once before any is asked from again


def test_with_ends_links_are_definitions_and_every_answer_is_where_they_lead():
    deep = Counter()
    for text in documents("hops:nodes=26,ends=3,hops=8,queries=19,docs=300"):
        links = [tuple(link.split()) for link in text.removeprefix("hops:").split("?")[0].split(";")]
        asked = re.findall(r"\? ([A-Z]) ([A-Z])(?=\?|$)", text)
        assert len(links) == len(dict(links)) == 23 and len(asked) == len(dict(asked)) == 19
        seen, ends = set(), {target for _, target in links} - set(dict(links))
        assert len(ends) == 3 and max(Counter(target for _, target in links).values()) == 1
        for source, target in links:  # each after that of its target
            assert target in seen | ends and source not in seen
            seen.add(source)
        hops = []
        for start, end in asked:
            node, n = start, 0
            while node in dict(links):
                node, n = dict(links)[node], n + 1
            assert node == end and 1 <= n <= 8
            hops.append(n)
        deep.update(hops)
        assert [(text[a.start + 1 : a.stop], a.hops) for a in answers(text)] == [
            (end, n) for (_, end), n in zip(asked, hops, strict=True)
        ]
    assert all(deep[n] > 300 * 19 / 20 for n in range(1, 9))
    given = Counter(end for text in documents("hops:nodes=26,ends=3,hops=8,docs=300") for end in text[-1])
    assert len(given) == 26


def test_with_ends_the_text_is_what_it_was():
    assert documents("hops:nodes=6,ends=2,hops=3,docs=2") == ENDS
    assert documents("hops:nodes=6,ends=2,hops=3,docs=700")[:2] == ENDS


def test_with_ends_all_are_asked_before_any_is_asked_again_which_is_no_new_answer():
    for text in documents("hops:nodes=10,ends=2,hops=4,queries=34,docs=50"):
        asked = re.findall(r"\? ([A-Z]) ([A-Z])", text)
        rounds = [asked[i : i + 8] for i in range(0, 34, 8)]
        assert len(set(asked)) == 8 and all(len(set(one)) == len(one) for one in rounds)
        assert [text[a.start + 1 : a.stop] for a in answers(text)] == [end for _, end in rounds[0]]


ENDS = [
    "hops: E D; A E; F A; B C? F D? B C? E D? A D",
    "hops: C A; F C; B D; E F? B D? C A? E A? F A",
]


def test_the_text_is_what_it_was():
    """Known bytes: a seed means the same documents in every version (raise _FORMAT where it does not)."""
    assert documents("hops:nodes=4,hops=3,docs=2") == KNOWN
    assert documents("hops:nodes=4,hops=3,docs=700")[:2] == KNOWN
    assert documents("hops:nodes=4,hops=3,docs=2,seed=1") != KNOWN


KNOWN = [
    "hops: A B; D A; B C; C D? 3 C B? 2 A C? 2 D B? 2 B D",
    "hops: A C; B D; C B; D A? 2 C D? 3 A D? 1 B D? 2 D C",
]


def test_documents_and_links_are_in_random_order():
    texts = documents("hops:docs=600")
    assert len(set(texts)) == 600
    first = Counter(next(iter(links_of(text))) for text in texts)
    assert len(first) == 9 and max(first.values()) < 2 * 600 / 9
    follows = Counter(links_of(text)["A"] for text in texts)
    assert len(follows) == 8 and max(follows.values()) < 2 * 600 / 8


def test_skew_asks_few_hops_more_often():
    def shares(skew):
        asked = Counter(
            h for text in documents(f"hops:nodes=20,hops=8,docs=400,skew={skew}") for _, h, _ in questions_of(text)
        )
        return np.array([asked[h] for h in range(1, 9)]) / 8000

    assert np.abs(shares(0) - 1 / 8).max() < 0.015
    harmonic = 1 / np.arange(1, 9)
    assert np.abs(shares(1) - harmonic / harmonic.sum()).max() < 0.015


def test_max_bytes_and_hash():
    text = documents("hops:docs=3")[0]
    assert documents("hops:docs=3", len(text) + 5) == [text, "hops:"]
    hashes = [corpus(spec).content_hash() for spec in ("hops", "hops:nodes=9", "hops:seed=1", "hops:skew=1")]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    assert corpus("hops:docs=50").n_bytes == sum(map(len, documents("hops:docs=50")))


def test_answers_are_found_with_their_hops():
    text = "hops: B C; A B; D A; C D? 2 A C? 1 D A? 3 B A"
    assert [(text[start:stop], hops) for start, stop, hops in answers(text)] == [(" C", 2), (" A", 1), (" A", 3)]
    both = f"Once \u00e9 upon: {text}\n<|endoftext|>\n{text}".encode()
    assert [(both[a.start : a.stop], a.hops) for a in answers(both)] == [(b" C", 2), (b" A", 1), (b" A", 3)] * 2
    for made in documents("hops:nodes=26,hops=25,docs=20"):
        assert [(made[a.start + 1 : a.stop], a.hops) for a in answers(made)] == [
            (b, h) for _, h, b in questions_of(made)
        ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hops:",
        "hops: A B",
        "A B; B A? 1 A B",
        "hops: A B; B A? 1 A A",  # not what the links say
        "hops: A B; B A? A B",  # they lead nowhere
        "hops: B C; A B? A B",
        "hops: B C; A B? C C",  # of no link
        "hops: A B; B A? 1 A",
        "hops: A B; B A? 1 C B",
        "hops: A B? 2 A C",  # a link that is not there
        "hops: A B; B A? 99999999999 A B",
        "Who hops: the rabbit? 1 A B",
        b"\xff\x00hops: \xfe? 1 A B",
    ],
)
def test_other_text_has_no_answers(text):
    assert answers(text) == []


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("hops:nodes=8,hops=8", "as many hops as nodes lead back to the start.*lower hops to 7 or raise nodes"),
        ("hops:nodes=27", "nodes.*26"),
        ("hops:nodes=9,hops=2,queries=19", "only 18 different questions; lower queries"),
        ("hops:nodes=0", "nodes"),
        ("hops:docs=0", "docs"),
        ("hops:docs=2.5", "docs"),
        ("hops:skew=-1", "skew"),
        ("hops:skew=nan", "skew"),
        ("hops:hop=3", "unknown key 'hop'.*did you mean 'hops'"),
        ("hops:nodes", "'nodes' is no option, or given twice"),
        ("hops:nodes=9,nodes=9", "'nodes=9' is no option, or given twice"),
        ("hops:nodes=nine", "nodes=nine is no number"),
        ("hops:nodes=9,,hops=3", "'' is no option"),
        ("hops:nodes=9,ends=3,hops=7", "6 nodes are defined, too few for so many hops; lower hops or ends"),
        ("hops:nodes=9,ends=9", "0 nodes are defined"),
        ("hops:nodes=9,ends=3,hops=1", "6 nodes are defined, too many for chains so short; raise hops or ends"),
        ("hops:nodes=9,ends=3,hops=4,skew=1", "skew=1 with ends.*leave skew out"),
        ("hops:ends=0", "ends"),
    ],
)
def test_bad_options_are_refused(spec, says):
    with pytest.raises(UsageError, match=says) as caught:
        corpus(spec)
    assert f"corpus {spec!r}" in str(caught.value)


def test_with_stories_each_name_and_number_is_one_token_and_a_document_fills_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("ALCODA_CACHE", str(tmp_path / "cache"))
    story = "Once upon a time there was a rabbit, and the rabbit had a house in a wood. "
    (tmp_path / "stories.txt").write_text("<|endoftext|>\n".join(f"{i}. {story * 3}\n" for i in range(40)))
    spec = "hops:nodes=18,hops=8,queries=18,docs=60"
    mix = [{"corpus": f"text:{tmp_path}/stories.txt"}, {"corpus": spec}]
    data = prepare(DataConfig.model_validate({"mix": mix, "tokenizer": Bpe(vocab_size=400)}))
    tokenizer, stream = data.tokenizer, data.split("train")["hops"]
    assert all(len(tokenizer.encode(f" {one}")) == 1 for one in [*"ABCDEFGHIJKLMNOPQR", *range(1, 9)])
    assert set(data.split("train")) == set(data.split("valid")) == set(data.split("calib")) == {"stories", "hops"}
    assert {len(document) for document in stream.documents()} == {3 * 18 + 4 * 18 + 2}
    batch, _ = next(Batches([("hops", 1.0, stream)], 4, 128, seed=0))
    for row in batch.inputs_BT:
        assert row[0] == tokenizer.eot and len(answers(tokenizer.decode(row))) == 18
