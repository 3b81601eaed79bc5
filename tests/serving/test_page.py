"""The page at `/` in a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import time

import chat_endpoint
import chromium
import httpx2
import pytest
import scripted
from reportlab.pdfgen import canvas
from scripted import answer, search
from scripted_agent import Held
from served_agent import CONFIG, SERVED, guarding, served
from starlette import responses, routing

from anysearch_jax import config as config_lib
from anysearch_jax import types
from anysearch_jax.agent import agent as agent_lib
from anysearch_jax.rollout import chat_completions, plain_text
from anysearch_jax.serving import service

pytestmark = pytest.mark.skipif(
  chromium.BINARY is None, reason="needs Chromium on the PATH"
)

EVIL = "<img src=x onerror=alert(1)><script>document.title='hacked'</script>"
# The same as Markdown: links that run or load something, and spoofed text.
EVIL_MARKDOWN = f"""{EVIL}
[run](javascript:alert(1)) [run](JaVaScRiPt:alert`1`) [x](data:text/html,1)
![loaded](https://evil.invalid/x.png) <https://evil.invalid/?q=1>
[https://bank.example](https://evil.invalid/login) [1](https://evil.invalid)
<iframe src="https://evil.invalid"></iframe> \u202egpj.exe
[x]: https://evil.invalid <svg onload=alert(1)>"""
DOCUMENTS = dataclasses.replace(
  CONFIG, prompts="documents", max_generated=10_000, max_context=40_000
)


browser = chromium.browser


@pytest.fixture(scope="module")
def url():
  passage = types.Passage("1", EVIL, EVIL)
  with served(
    engine=scripted.Engine(
      lambda r: answer(f"Jane {EVIL}") if r.turn else search(f"emma {EVIL}")
    ),
    retriever=scripted.Retriever({f"emma {EVIL}": [passage]}),
    slots=8,
  ) as (address, _):
    yield address


def wait(browser, expression):
  """Waits until an expression of the page is true."""
  end = time.monotonic() + 20
  while not browser.run(f"Boolean({expression})"):
    assert time.monotonic() < end, browser.run("document.body.innerText")
    time.sleep(0.05)


def opened(browser, url, width=1280):
  browser.errors.clear()
  browser.open(f"{url}/", width=width, height=900)
  wait(browser, "document.querySelectorAll('#list button').length")
  return browser


def ask(page, question):
  """Types a question, sends it and waits for its answer."""
  page.run("document.getElementById('question').focus()")
  page.press(question)
  page.press("Enter")
  wait(page, f"{LAST}?.querySelector('.reply > .bar')")


def text(page, selector):
  return page.run(f"document.querySelector({json.dumps(selector)}).innerText")


def click(page, selector):
  page.run(f"document.querySelector({json.dumps(selector)}).click()")


LAST = "document.querySelector('article:last-child')"
ENDED = "document.querySelectorAll('.reply > .bar').length"
BUTTON = "[...document.querySelectorAll('button')].findLast(b => b.innerText"


@pytest.mark.parametrize("width", [1280, 400])
def test_question_is_asked_and_answered_by_keyboard(browser, url, width):
  page = opened(browser, url, width)
  assert page.run("document.activeElement.id") == "question"
  page.press("Who wrote")
  page.press("Shift+Enter")
  page.press("Emma?")
  page.press("Tab")  # To the budget: 3 of at most 5.
  page.press("ArrowRight")
  assert text(page, "#shown") == "4"
  for _ in range(2):
    page.press("Tab")
  assert page.run("document.activeElement.id") == "ask"
  page.press("Enter")
  wait(page, f"{ENDED} === 1")
  assert text(page, "article h2") == "Who wrote\nEmma?"
  question, reply = page.run(
    "[...document.querySelectorAll('article h2, article .text')]"
    ".map(e => e.getBoundingClientRect().top)"
  )
  assert question < reply
  assert "Jane" in text(page, "article .text")
  assert "1 of 4 searches" in text(page, ".reply > .bar")
  click(page, "summary")
  steps = text(page, ".steps")
  assert "Search 1: emma" in steps and "3 searches left" in steps
  assert page.run("document.activeElement.id") == "question"
  assert "Jane" in page.run("document.querySelector('#status').textContent")
  assert page.run("document.documentElement.scrollWidth") <= width
  assert not page.errors
  click(page, "#clear")


def test_outside_text_is_shown_and_never_run(browser):
  passage = types.Passage("1", EVIL, EVIL)
  hostile = scripted.Engine(
    lambda r: answer(EVIL_MARKDOWN) if r.turn else search("emma")
  )
  with served(
    engine=hostile,
    retriever=scripted.Retriever({"emma": [passage]}),
    config=DOCUMENTS,
  ) as (address, _):
    page = opened(browser, address)
    ask(page, EVIL)
    assert EVIL in text(page, "article h2") and EVIL in text(page, ".text")
    made = "document.querySelectorAll('article :is(img,script,iframe,svg)')"
    assert page.run(f"{made}.length") == 0
    links = page.run(
      "[...document.querySelectorAll('article a')]"
      ".map(a => [a.protocol, a.innerText, a.nextSibling?.textContent])"
    )
    assert links == [
      ["https:", "image: loaded", " (evil.invalid)"],
      ["https:", "https://evil.invalid/?q=1", "\n"],
      ["https:", "https://bank.example", " (evil.invalid)"],
      ["https:", "https://evil.invalid", ')\n<iframe src="'],
      ["https:", "https://evil.invalid", '"></iframe> \ufffdgpj.exe\n[x]: '],
      ["https:", "https://evil.invalid", " <svg onload=alert(1)>"],
    ]
    assert "[run](javascript:alert(1))" in text(page, ".text")
    assert "\u202e" not in text(page, ".text")
    # A link cannot pose as a citation.
    click(page, ".cite")
    assert text(page, "#passage .quote") == EVIL
    assert page.run("document.title") == "AnySearch" and not page.errors


MARKDOWN = {
  "**a *b*** `<i>` ~~c~~": "<p><strong>a <em>b</em></strong> "
  "<code>&lt;i&gt;</code> <del>c</del></p>",
  "***a*** **b *c**": "<p><strong><em>a</em></strong> "
  "<strong>b *c</strong></p>",
  "2 * 3 * 4 snake_case_name __init__": "<p>2 * 3 * 4 snake_case_name "
  "<strong>init</strong></p>",
  "\\*a\\* ``b`c``": "<p>*a* <code>b`c</code></p>",
  "# A\n#hash\n#### B ##": "<h3>A</h3><p>#hash</p><h6>B</h6>",
  "a\nb\n\nc": "<p>a\nb</p><p>c</p>",
  "- a\n  - b\n\n- c": "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li>"
  "<li><p>c</p></li></ul>",
  "3. a\n   ```\n   x\n   ```\n4. b": '<ol start="3"><li><p>a</p>'
  "<pre>x</pre></li><li><p>b</p></li></ol>",
  "In\n1984. Orwell": "<p>In\n1984. Orwell</p>",
  "> a\n> - b\n\nc": "<blockquote><p>a</p><ul><li><p>b</p></li></ul>"
  "</blockquote><p>c</p>",
  "---\n- [ ] a": "<hr><ul><li><p>☐ a</p></li></ul>",
  "|a|b|\n|:-|-:|\n|1 \\| 2|**3**|\n|x|\n\nc": "<table><thead><tr>"
  '<th>a</th><th class="right">b</th></tr></thead><tbody><tr><td>1 | 2</td>'
  '<td class="right"><strong>3</strong></td></tr><tr><td>x</td></tr></tbody>'
  "</table><p>c</p>",
  "```python\n<b>\n\n# no\n": "<pre>&lt;b&gt;\n\n# no\n</pre>",
  "[a](https://x.org/b_(c)) <br>mail": '<p><a href="https://x.org/b_(c)">a</a>'
  " (x.org) \nmail</p>",
  "see https://x.org/a_b_c.": '<p>see <a href="https://x.org/a_b_c">'
  "https://x.org/a_b_c</a>.</p>",
  "[a](/documents/x) [b](//x.org)": "<p>[a](/documents/x) [b](//x.org)</p>",
}
_RENDER = """import('./markdown.js').then(({addMarkdown}) => {
  const made = document.createElement('div');
  const start = performance.now();
  addMarkdown(made, %s);
  made.seconds = (performance.now() - start) / 1000;
  for (const bar of made.querySelectorAll('.bar')) bar.remove();
  for (const code of made.querySelectorAll('pre code, .code, .table, .host'))
    code.replaceWith(...code.childNodes);
  for (const link of made.querySelectorAll('a, pre'))
    for (const name of ['target', 'rel', 'tabindex'])
      link.removeAttribute(name);
  return %s;
})"""


def rendered(page, source, value):
  """Returns a value of the element `made` that shows a text."""
  return page.run(_RENDER % (json.dumps(source), value))


def test_markdown_is_elements(browser, url):
  page = opened(browser, url)
  made = {
    source: rendered(page, source, "made.innerHTML") for source in MARKDOWN
  }
  assert made == MARKDOWN


def test_long_markdown_is_shown_in_time(browser, url):
  page = opened(browser, url)
  pieces = (
    *("*a ", "**a ", "[", "[a](", "`a", "``a` ", "_a__b_", "*_~", "[1]", "é"),
    *("> ", "|a", "- ", "<", "~", "a\n", "- a\n", "|-|\n", "![", "https://a"),
    *("\\", "(", "a.", "\u202e", "1. ", "  - a\n", "- a\n\n\n", "- - - "),
    *("```\n", "|a|b|\n|-|-|\n", "1", "a " * 50 + "\n"),
  )
  for piece in pieces:
    source = (piece * 200_000)[:200_000]
    seconds = rendered(page, source, "made.seconds")
    assert seconds < 30, piece
  whole = rendered(page, "é<" * 100_000, "made.textContent.length")
  assert whole == 200_000


def test_follow_up_questions_carry_the_conversation(browser):
  engine = scripted.Engine(
    lambda r: answer("A **novel** [1].") if r.turn else search("emma")
  )
  novel = types.Passage("1", "Emma", "A novel.")
  with served(
    engine=engine,
    retriever=scripted.Retriever({"emma": [novel]}),
    config=DOCUMENTS,
  ) as (address, _):
    page = opened(browser, address)

    def prompt():
      return scripted.CODEC.decode(engine.requests[-1].token_ids)

    ask(page, "What is Emma?")
    assert "user:" not in prompt()
    page.open(f"{address}/", width=1280, height=900)  # The tab keeps it.
    wait(page, f"{ENDED} === 1")
    assert text(page, "article h2") == "What is Emma?"
    assert text(page, "article .text") == "A novel [1]."
    ask(page, "By whom?")
    earlier = "user: What is Emma?\nassistant: A **novel**.\n"
    assert f"{earlier}question: By whom?" in prompt()
    click(page, "#clear")
    assert page.run("document.querySelectorAll('article').length") == 0
    page.run(f"{BUTTON} === 'Undo').click()")
    assert page.run(ENDED) == 2
    click(page, "#clear")
    ask(page, "And Persuasion?")
    assert "And Persuasion?" in prompt() and "user:" not in prompt()
    assert not page.errors


def test_oldest_turns_that_have_no_room_are_counted(browser, monkeypatch):
  monkeypatch.setattr(agent_lib.Agent, "history_characters", 850)
  engine = scripted.Engine(lambda _: answer("x" * 300))
  with served(engine=engine) as (address, _):
    page = opened(browser, address)
    ask(page, "a" * 100)
    ask(page, "b" * 100)
    assert "left out" not in text(page, "article:last-child")
    ask(page, "c" * 100)
    note = text(page, "article:last-child .note")
    assert note.startswith("1 question is left out of the conversation")
    prompt = scripted.CODEC.decode(engine.requests[-1].token_ids)
    assert "b" * 100 in prompt and "a" * 100 not in prompt


def test_every_budget_is_shown_side_by_side(browser, url):
  page = opened(browser, url)
  page.run("document.getElementById('question').value = 'Who?'")
  click(page, "#every")
  wait(page, f"{ENDED} === 5")
  heads = page.run(
    "[...document.querySelectorAll('.reply h3')].map(h => h.textContent)"
  )
  assert heads == [f"Budget {b}" for b in (0, 1, 2, 3, 5)]
  tops = page.run(
    "[...document.querySelectorAll('.reply')].slice(0, 3)"
    ".map(a => a.getBoundingClientRect().top)"
  )
  assert len(set(tops)) == 1
  # Only the answers, so that they can be compared.
  assert not page.run("document.querySelectorAll('.steps[open]').length")
  assert not page.errors
  click(page, "#clear")


def test_key_with_fewer_requests_at_a_time_is_asked_every_budget(
  browser, tmp_path
):
  key, guard = guarding(tmp_path, requests=2)
  engine = scripted.Engine(lambda _: answer("Jane"), seconds=lambda: 0.3)
  with served(engine=engine, guard=guard) as (address, _):
    page = opened(browser, address)
    page.run("document.getElementById('question').value = 'Who?'")
    page.run(f"document.getElementById('key').value = {key!r}")
    click(page, "#every")
    wait(page, f"{ENDED} === 5")
    assert page.run("document.querySelectorAll('.problem').length") == 0


def test_stopped_answer_keeps_its_steps_and_can_be_asked_again(browser):
  engine = Held([search("emma"), answer("Jane")])
  engine.go.set()
  with served(engine=engine) as (address, _):
    page = opened(browser, address)
    engine.go.clear()
    page.press("Who wrote Emma?")
    page.press("Enter")
    wait(page, "document.querySelector('#stop:not([hidden])')")
    page.press("And this")
    page.press("Enter")  # One at a time; what is typed stays.
    assert "Esc stops it" in text(page, "#hint")
    page.press("Escape")
    wait(page, f"{ENDED} === 1")
    assert text(page, ".problem") == "Stopped."
    assert text(page, "article h2") == "Who wrote Emma?"
    assert page.run("document.querySelector('#question').value") == "And this"
    engine.go.set()
    page.run(f"{BUTTON} === 'Ask again').click()")
    wait(page, "document.querySelector('.text')?.innerText === 'Jane'")
    assert page.run("document.querySelectorAll('.reply').length") == 1
    assert page.run("document.querySelectorAll('.problem').length") == 0


@pytest.mark.parametrize("mode", ["tools", "tags"])
def test_text_is_shown_while_it_is_written_and_kept_when_stopped(browser, mode):
  words = " ".join(f"*word{n}*" for n in range(60))
  plain = words.replace("*", "")
  lease = types.Passage("1", "Lease", "It ends in March.")
  codec = plain_text.PlainText()
  with (
    chat_endpoint.served(mode, answer=words) as server,
    contextlib.closing(
      chat_completions.ChatEngine(
        server.url,
        codec,
        mode=mode,
        model="scripted",
        sampling=config_lib.SamplingConfig(),
        deadline=20.0,
        concurrency=4,
      )
    ) as engine,
    served(
      agent=agent_lib.Agent(
        engine,
        codec,
        scripted.Retriever({"lease end": [lease]}),
        config=CONFIG,
        slots=1,
        examples=[types.Question("1", "When?", ("March",))],
      )
    ) as (address, _),
  ):
    server.faults += [chat_endpoint.Fault(), chat_endpoint.Fault(drip=0.1)]
    page = opened(browser, address)
    page.press("When?")
    page.press("Enter")
    wait(page, "document.querySelector('.text em')")
    page.press("Escape")
    wait(page, f"{ENDED} === 1")
    kept = text(page, ".text").replace("*", "")
    assert plain.startswith(kept) and 3 < len(kept) < len(plain)
    assert text(page, ".problem") == "Stopped."
    page.open(f"{address}/", width=1280, height=900)
    wait(page, f"{ENDED} === 1")
    assert text(page, ".text").replace("*", "") == kept
    page.run(f"{BUTTON} === 'Ask again').click()")
    wait(page, f"{ENDED} === 1 && !document.querySelector('.problem')")
    assert text(page, ".text") == plain
    assert not page.errors


def test_stop_keeps_the_search_that_was_made(browser):
  engine = Held([search("emma"), answer("Jane")])

  async def second_turn_waits(request):
    if request.turn:
      engine.go.clear()
    return await Held.generate(engine, request)

  engine.go.set()
  slow = scripted.Engine(())
  slow.generate = second_turn_waits
  with served(engine=slow) as (address, _):
    page = opened(browser, address)
    page.press("Who?")
    page.press("Enter")
    wait(page, "document.querySelector('.passages')")
    page.press("Escape")
    wait(page, f"{ENDED} === 1")
    assert "Search 1: emma" in text(page, ".steps")
    page.open(f"{address}/", width=1280, height=900)
    wait(page, f"{ENDED} === 1")
    assert "Search 1: emma" in text(page, ".steps")
    engine.go.set()


def test_refused_question_can_be_sent_again(browser, tmp_path):
  key, guard = guarding(tmp_path)
  with served(guard=guard) as (address, _):
    page = opened(browser, address)
    ask(page, "Who wrote Emma?")
    assert "key" in text(page, ".problem")
    assert text(page, "article h2") == "Who wrote Emma?"
    page.run(f"document.getElementById('key').value = {key!r}")
    page.run(f"{BUTTON} === 'Ask again').click()")
    wait(page, "document.querySelector('.text')?.innerText === 'Jane'")


def test_ten_thousand_characters_are_asked_whole(browser):
  engine = scripted.Engine(lambda _: answer("Yes."))
  config = dataclasses.replace(CONFIG, max_context=20_000)
  with served(engine=engine, config=config) as (address, _):
    page = opened(browser, address)
    question = "".join(f"word{n:05} " for n in range(1000)).strip()
    ask(page, question)
    prompt = scripted.CODEC.decode(engine.requests[-1].token_ids)
    assert len(question) == 9999 and question in prompt
    page.run(
      "const field = document.getElementById('question');"
      "field.value = '\\u{1f600}'.repeat(200007);"
      "field.dispatchEvent(new Event('input'))"
    )
    sentence = "Found 200,007 characters, expected at most 200,000"
    assert sentence in text(page, "#hint")
    page.press("Enter")
    assert page.run("document.querySelectorAll('article').length") == 1
    typed = page.run("[...document.getElementById('question').value].length")
    assert typed == 200_007


def test_answer_is_copied_and_conversation_saved(browser, tmp_path):
  source = types.Source("notes/lease.pdf", 3, "Term")
  lease = types.Passage("1", "Lease", "March.", source=source)
  with served(
    engine=scripted.Engine([search("lease"), answer("**March** [1].")]),
    retriever=scripted.Retriever({"lease": [lease]}),
    config=DOCUMENTS,
  ) as (address, _):
    page = opened(browser, address)
    page.allow(tmp_path)
    ask(page, "When does\nit end?")
    expected = "**March** [1].\n\n- [1] Lease · notes/lease.pdf · page 3 · Term"
    page.run(f"{BUTTON} === 'Copy').click()")
    wait(page, f"{BUTTON} === 'Copied')")
    assert page.run("navigator.clipboard.readText()") == expected
    page.run(f"{BUTTON} === 'Save as JSON').click()")
    click(page, "#export")
    end = time.monotonic() + 20
    while len([*tmp_path.glob("*.json"), *tmp_path.glob("*.md")]) < 2:
      assert time.monotonic() < end
      time.sleep(0.05)
    exported = (tmp_path / "conversation.md").read_text()
    assert exported.startswith("# Conversation with tiny, 20")
    quoted = "## Question 1\n\n> When does\n> it end?\n\n"
    assert f"{quoted}{expected}\n\n*1 of 3 searches · " in exported
    (saved,) = tmp_path.glob("*.json")
    assert json.loads(saved.read_text())["anysearch"]["searches"] == 1


def test_citation_shows_its_passage_and_a_refused_one_is_said(browser):
  source = types.Source("/home/joe/notes/lease.pdf", 3, f"Term > {EVIL}")
  lease = types.Passage("1", EVIL, EVIL, source=source)
  turns = [search("lease"), search("again"), answer("March [1], no [7].")]
  with served(
    engine=scripted.Engine(turns),
    retriever=scripted.Retriever({"lease": [lease], "again": [lease]}),
    config=DOCUMENTS,
  ) as (address, _):
    page = opened(browser, address, width=400)
    ask(page, "When?")
    click(page, ".cite")
    head = f"[1] {EVIL} · lease.pdf · page 3 · Term > {EVIL}"
    assert text(page, "#passage h2") == head
    assert text(page, ".quote") == EVIL
    assert page.run("document.activeElement.id") == "close"
    page.press("Escape")
    assert page.run("document.getElementById('source').hidden")
    assert page.run("document.activeElement.className") == "cite"
    reply = text(page, ".reply")
  assert "March [1], no." in reply and "It also cited [7]" in reply
  assert head in reply
  assert page.run("document.title") == "AnySearch" and not page.errors


def _pdf():
  data = io.BytesIO()
  sheet = canvas.Canvas(data)
  sheet.drawString(100, 700, "The lease ends in March.")
  sheet.save()
  return data.getvalue()


@pytest.mark.parametrize(
  ("kind", "content", "sandbox"),
  [
    ("text/plain", b"It ends in March.", ""),
    ("application/pdf", _pdf(), None),
    ("text/html", b"<script>parent.document.title = 'hacked'</script>", False),
  ],
)
def test_document_is_shown_beside_its_answer(
  browser, monkeypatch, kind, content, sandbox
):
  """A kind that may run script is a link alone."""
  create = service.create_app

  def with_document(made):
    app = create(made)
    document = responses.Response(content, media_type=kind)
    app.router.routes.append(routing.Route("/documents/lease", document))
    return app

  monkeypatch.setattr(service, "create_app", with_document)
  passages = []
  with served(
    engine=scripted.Engine([search("lease"), answer("March [1].")]),
    retriever=scripted.Retriever({"lease": passages}),
    config=DOCUMENTS,
  ) as (address, _):
    document_url = f"{address}/documents/lease#page=1"
    passages.append(types.Passage(document_url, "Lease", "March."))
    page = opened(browser, address)
    ask(page, "When?")
    click(page, ".cite")
    link = page.run(
      "(({href, target, rel}) => ({href, target, rel}))"
      "(document.querySelector('#passage a'))"
    )
    assert link == {
      "href": document_url,
      "target": "_blank",
      "rel": "noopener noreferrer",
    }
    if sandbox is False:
      time.sleep(0.5)
      assert page.run("document.querySelectorAll('iframe').length") == 0
    else:
      wait(page, "document.querySelector('iframe')")
      frame = "document.querySelector('iframe')"
      assert page.run(f"{frame}.getAttribute('sandbox')") == sandbox
      assert page.run(f"{frame}.src").startswith(document_url)
    assert page.run("document.title") == "AnySearch" and not page.errors


def test_world_of_few_words_gets_single_questions(browser, monkeypatch):
  class Words(scripted.Codec):
    hf = type("Tokenizer", (), {"unk_token_id": 0})

    def encode(self, text):
      return [0] if text == "user:" else super().encode(text)

  monkeypatch.setattr("served_agent.CODEC", Words())
  engine = scripted.Engine(lambda _: answer("Jane"))
  with served(engine=engine) as (address, _):
    page = opened(browser, address)
    assert page.run("document.getElementById('follow').hidden")
    for question in ("Who wrote Emma?", "Who else?"):
      ask(page, question)
    assert text(page, "article:last-child .text") == "Jane"
    prompt = scripted.CODEC.decode(engine.requests[-1].token_ids)
    assert "Who else?" in prompt and "Who wrote Emma?" not in prompt


def test_browser_may_load_nothing_from_elsewhere(url):
  loaded = ("/", "/page.js", "/markdown.js", "/page.css")
  for path in loaded:
    headers = httpx2.get(f"{url}{path}").headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
  health = httpx2.get(f"{url}/health").json()
  assert health["max_characters"] == 200_000
  # Half of the context, at four characters a token.
  assert health["history_characters"] == 2 * CONFIG.max_context
  assert health["max_budget"] == SERVED.max_budget
