"""The report in a browser: it works from a file, on laptop and phone."""

from __future__ import annotations

import json
import re

import chromium
import pytest
import study

from anysearch_jax.evaluation import metrics
from anysearch_jax.report import trajectories

pytestmark = pytest.mark.skipif(
  chromium.BINARY is None, reason="There is no chromium here."
)
_BESIDE = "trajectories.html"
_HOSTILE = (
  "<img src=x onerror=\"document.title='run'\"></script><script>document.title="
  "'run'</script><svg onload=\"document.title='run'\">"
)


def _hostile(episode):
  return episode | {
    "question": _HOSTILE + episode["question"],
    "answer": _HOSTILE,
    "golden_answers": [_HOSTILE],
    "reason": _HOSTILE,
  }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  size = {"questions": 30, "budgets": (0, 2, 6)}
  rows = [study.row("A", **size), study.row("B", thrift=0.8, **size)]
  samples = [
    trajectories.Sample(row.label, row.episodes, study.decode) for row in rows
  ]
  group = {
    key: value for key, value in rows[0].episodes[0].items() if key != "tokens"
  } | {"training": True, "reward": 0.65, "advantage": -1.25, "seed": 7}
  samples[0] = trajectories.Sample(
    "A", [_hostile(e) for e in rows[0].episodes], _decoded
  )
  output = tmp_path_factory.mktemp("report") / "report.html"
  data = study.write(
    output,
    rows,
    [study.training("A")],
    samples=samples,
    recorded=[trajectories.Sample("A, training", [_hostile(group)])],
    words={"notes": _HOSTILE},
  )
  return output, data


def _decoded(ids):
  """Decodes to the study's text with hostile text before each `</answer>`."""
  return study.decode(ids).replace("</answer>", f"{_HOSTILE}</answer>")


browser = chromium.browser


@pytest.fixture
def page(browser, written):
  browser.errors.clear()
  browser.open(written[0].with_name(_BESIDE), width=1366, height=768)
  yield browser
  assert browser.errors == []


def _choose(page, part, value):
  page.run(
    f"""(() => {{
      const control = document.querySelector('[data-part="{part}"]');
      control.value = {json.dumps(value)};
      control.dispatchEvent(new Event(
        control.tagName === 'SELECT' ? 'change' : 'input'));
    }})()"""
  )


def _text(page, selector):
  return page.run(f"document.querySelector('{selector}').textContent")


def _listed(page):
  return page.run(
    "[...document.querySelectorAll('.list small')].map(e => e.textContent)"
  )


# Elements that clip their content; tables and the browser's list scroll.
_CUT = """[...document.querySelectorAll('body *')].filter(e =>
  (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1) &&
  e.clientWidth && getComputedStyle(e).overflow !== 'visible' &&
  !e.closest('.scroll, .list, svg, select, input'))
  .map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  """Writes a page with many budgets and datasets, long labels and texts."""
  names = ("musique", "nq", "triviaqa", "popqa", "hotpotqa", "bamboogle")
  long = " ".join(["a passage that goes on and on"] * 200)

  def whole(row):
    return metrics.Row(
      row.label,
      tuple(
        e
        | {
          "dataset": names[int(e["question_id"][1:]) % len(names)],
          "spans": [{"author": "environment", "text": long}, *e["spans"]],
        }
        for e in row.episodes
      ),
    )

  rows = [
    whole(study.row(label, questions=12, budgets=tuple(range(9))))
    for label in ("A", "A rather long label of a method", "no-space-" * 6)
  ]
  rows.append(whole(study.row("some", questions=12, budgets=(0, 1, 5))))
  output = tmp_path_factory.mktemp("large") / "report.html"
  training = [study.training(row.label) for row in rows[:3]]
  study.write(output, rows, training=training)
  return output


def _sections(page):
  """Returns where each section begins, and whether it is open."""
  return page.run(
    """Object.fromEntries([...document.querySelectorAll('section')].map(e =>
      [e.id, [e.getBoundingClientRect().top,
              e.querySelector('details')?.open ?? true]]))"""
  )


@pytest.mark.parametrize(("width", "screens"), [(1280, 2), (400, 4)])
def test_the_page_is_short_until_a_link_opens_a_section(
  browser, large, width, screens
):
  browser.open(large, width=width, height=800)
  assert browser.run("document.documentElement.scrollHeight") < screens * 800
  first = _sections(browser)
  assert [name for name, (_, shown) in first.items() if shown] == ["curves"]
  for _ in range(2):  # A link to an open section leads to it again.
    browser.run("scrollTo(0, 0)")
    browser.run("document.querySelector('a[href=\"#pairs\"]').click()")
    top, shown = _sections(browser)["pairs"]
    assert shown and abs(top) < 2
  # So does the hash of an address.
  browser.open(f"{large.as_uri()}?again#table-main", width=width, height=800)
  opened = [name for name, (_, shown) in _sections(browser).items() if shown]
  assert opened == ["curves", "paper"]


def test_the_first_screen_has_the_whole_figure(browser, large):
  browser.open(large, width=1280, height=800)
  ends = browser.run(
    """[...document.querySelectorAll('nav a, main > p, #curves svg')].map(e =>
      e.getBoundingClientRect().bottom)"""
  )
  assert len(ends) > 12 and max(ends) < 800


def test_nine_rows_have_nine_colours_on_both_pages(browser, tmp_path):
  rows = [study.row(f"row {i}", questions=3, budgets=(2,)) for i in range(9)]
  study.write(tmp_path / "report.html", rows)
  colours = """Object.fromEntries(
    [...document.querySelectorAll('SELECTOR')].map(e => [
      e.textContent.match(/row \\d/)[0],
      getComputedStyle(e.querySelector('.mark')).color]))"""
  found = []
  for name, selector in (
    ("report.html", "#curves .legend li"),
    ("report.html", "#table-overview tbody tr"),
    (_BESIDE, ".list button"),
  ):
    script = colours.replace("SELECTOR", selector)
    browser.open(tmp_path / name, width=1280, height=800)
    light = browser.run(script)
    browser.dark()
    found.append((light, browser.run(script)))
  assert [len(set(theme.values())) for theme in found[0]] == [9, 9]
  assert found[1:] == found[:1] * 2


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", ["report.html", _BESIDE])
def test_content_is_not_clipped_on_screen(browser, large, name, width):
  browser.open(large.with_name(name), width=width, height=800)
  browser.run("document.querySelectorAll('details').forEach(d => d.open = 1)")
  assert browser.run(_CUT) == []
  # A phone widens its viewport for wide content.
  assert browser.run("document.documentElement.scrollWidth") <= width


def test_content_is_not_clipped_in_print(browser, large):
  browser.open(large, width=1280, height=800)
  browser.run("document.querySelectorAll('.lines').forEach(d => d.open = 1)")
  # A4 landscape without its margins: 297 - 24 mm at 96 pixels per inch.
  browser.printed(width=1031)
  assert browser.run(_CUT) == []
  # Elements that do not scroll could still extend beyond the edge.
  over = """[...document.querySelectorAll('main *')].filter(e =>
    e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('svg'))
    .map(e => e.outerHTML.slice(0, 80))"""
  assert browser.run(over) == []
  shown = """[...document.querySelectorAll('SELECTOR')].map(e =>
    e.checkVisibility() && e.offsetHeight > 0)"""
  found = browser.run(shown.replace("SELECTOR", ".fold table"))
  assert len(found) > 8 and all(found)
  browser.open(large.with_name(_BESIDE), width=1280, height=800)
  browser.printed(width=1031)
  assert browser.run(shown.replace("SELECTOR", ".response")) == [True]
  assert not any(browser.run(shown.replace("SELECTOR", ".list, .filters")))


def test_the_browser_opens_on_an_episode_with_several_searches(page):
  made = re.search(r"(\d+) search", _text(page, "[aria-current=true]"))
  assert int(made[1]) > 2
  top, scrolled, height = page.run(
    """[document.querySelector('[aria-current=true]').offsetTop,
      document.querySelector('.list').scrollTop,
      document.querySelector('.list').clientHeight]"""
  )
  assert 0 <= top - scrolled < height


def test_untrusted_text_is_never_executed(page):
  assert page.run("document.title") == "One policy, any budget: A"
  assert page.run("document.querySelectorAll('script').length") == 2
  assert page.run("document.querySelectorAll('img, [onerror]').length") == 0
  for shade in ("logp", "difference", "advantage", "author"):
    _choose(page, "shade", shade)
  assert "<img src=x onerror" in _text(page, "[data-part=detail] h3")
  assert page.run("document.title") == "One policy, any budget: A"


def test_filters_narrow_the_list(page):
  everything = _text(page, "[data-part=status]")
  _choose(page, "row", "1")
  _choose(page, "budget", "6")
  found = _listed(page)
  assert found
  assert all(text.startswith("B · B = 6") for text in found)
  assert _text(page, "[data-part=status]") != everything
  _choose(page, "em", "1")
  right = _listed(page)
  assert 0 < len(right) < len(found)
  assert all(text.endswith("right") for text in right)
  _choose(page, "text", "kel3x0 kel3x0 nowhere")
  assert _listed(page) == []
  assert "No trajectory passes" in _text(page, "[data-part=detail]")
  _choose(page, "text", "")
  assert _listed(page) == right


def test_token_shows_its_log_probability(page, written):
  _choose(page, "row", "1")
  _choose(page, "shade", "logp")
  payload = json.loads(_text(page, "#browser-data"))
  shown = _text(page, "[data-part=detail] h3")
  (entry,) = (
    e
    for e in payload["entries"]
    if e["row"] == 1
    and e["question"] == shown
    and f"B = {e['budget']} ·" in _text(page, "[data-part=detail] p")
  )
  page.run("document.querySelectorAll('.token')[1].click()")
  told = _text(page, "[data-part=told]")
  logp = f"{entry['tokens']['logps'][1]:.3f}".replace("-", "−")
  assert f"log-probability {logp}," in told
  assert told.endswith("policy version 3")
  assert page.run("document.querySelectorAll('.token.down').length") > 0


def test_comparison_marks_where_rows_diverge(page):
  _choose(page, "row", "1")
  _choose(page, "shade", "difference")
  note = _text(page, "[data-part=shade-note]")
  assert "Log-probability here minus A's" in note
  # Rows are compared on the tokens before the first difference only.
  payload = json.loads(_text(page, "#browser-data"))
  ours, theirs = (
    {
      (e["question_id"], e["budget"]): e["tokens"]["texts"]
      for e in payload["entries"]
      if e["row"] == row
    }
    for row in (1, 0)
  )
  first = next(iter(ours))
  shared = 0
  for one, other in zip(ours[first], theirs[first]):
    if one != other:
      break
    shared += 1
  assert f"({shared} tokens of the response)" in note


def test_advantage_is_shown_for_training_only(page):
  _choose(page, "shade", "advantage")
  assert "rows of GRPO trainings" in _text(page, "[data-part=shade-note]")
  _choose(page, "row", "2")
  facts = _text(page, "[data-part=detail] p")
  assert "rollout 7" in facts
  assert "reward 0.650 · advantage −1.250" in facts
  assert page.run("document.querySelectorAll('.piece .down').length") > 0


def test_text_has_enough_contrast(browser, written):
  script = """(() => {
    const light = (text) => {
      const [r, g, b] = text.match(/[\\d.]+/g).map((x) => x / 255).map((x) =>
        x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (e) => {
      for (; e; e = e.parentElement) {
        const color = getComputedStyle(e).backgroundColor;
        if (!/, 0\\)$/.test(color) && color !== 'transparent') return color;
      }
      return 'rgb(255, 255, 255)';
    };
    const low = [];
    for (const e of document.querySelectorAll(
      'p, th, td, small, a, button, label, h1, h2, h3, .text, .who, summary')) {
      const [a, b] = [light(getComputedStyle(e).color), light(ground(e))];
      const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      if (ratio < 4.5) low.push(e.outerHTML.slice(0, 80));
    }
    return low;
  })()"""
  browser.open(written[0], width=1366, height=768)
  assert browser.run(script) == []
  browser.dark()
  assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches")
  assert browser.run(script) == []


def test_injected_script_is_not_executed(browser, written, tmp_path):
  """If escaping failed, the content security policy would block the script."""
  page = written[0].with_name(_BESIDE).read_text("utf-8")
  scripts = (
    "<script>document.title='run'</script>"
    "<img src=x onerror=\"document.title='run'\">"
    "<svg onload=\"document.title='run'\"></svg>"
    "<style>h1 { display: none }</style>"
    "<script src='https://example.org/x.js'></script>"
  )
  hurt = tmp_path / "hurt.html"
  for head, tail in (("</header>", scripts), ("</main>", scripts)):
    hurt.write_text(page.replace(head, head + tail, 1), "utf-8")
    browser.errors.clear()
    browser.open(hurt, width=1366, height=768)
    assert browser.run("document.title") == "One policy, any budget: A"
    assert browser.run("document.querySelector('h1').offsetHeight") > 0
    refused = [e for e in browser.errors if "Content Security Policy" in e]
    assert len(refused) >= 5
    assert any("https://example.org/x.js" in e for e in refused)
    assert _listed(browser)  # Its own script works.
