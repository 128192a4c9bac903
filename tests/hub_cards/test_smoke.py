from hub_cards.check import check


def test_smoke(staged, trained, report, prose, tmp_path):
    from hub_cards.build import build

    print(check(staged))
    s = build(trained, "me/X", tmp_path / "a", prose, diagnostics=report, license="apache-2.0", dtype="bfloat16")
    print(check(s))
    print((s / "README.md").read_text())
    print(sorted(p.name for p in s.rglob("*")))
    assert 0
