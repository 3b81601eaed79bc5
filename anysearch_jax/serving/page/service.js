// The service's routes as the page uses them.

// Returns the JSON of a route.
export async function get(route) {
  return (await fetch(route)).json();
}

// A refusal of the service, as a sentence; `needsKey` if it wants a key.
export class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.needsKey = status === 401;
  }
}

// Yields the events of an answer.
//
// messages: the conversation; its last message is the question.
// budget: how many searches it may cost.
// key: of the client; "" without one.
// signal: ends the request.
export async function* answerEvents(messages, budget, key, signal) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const body = JSON.stringify({
    input: messages,
    max_tool_calls: budget,
    stream: true,
    stream_options: { include_draft: true },
  });
  const request = { method: "POST", headers, body, signal };
  const response = await admitted("v1/responses", request);
  if (!response.ok)
    throw new Refusal(await sentence(response), response.status);
  yield* events(response.body);
}

// A key may ask only so much at a time: what is refused for that alone is asked
// again when the service says so.
async function admitted(url, request) {
  for (;;) {
    const response = await fetch(url, request);
    if (response.status !== 429) return response;
    const refusal = await response.clone().json();
    if (refusal.error.code !== "rate_limit_exceeded") return response;
    const seconds = Number(response.headers.get("retry-after")) || 1;
    await new Promise((done) => setTimeout(done, 1000 * seconds));
    request.signal.throwIfAborted();
  }
}

async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The service answered ${response.status}.`;
  }
}

// Yields the JSON of each server-sent event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const frames = (rest + value).split("\n\n");
      rest = frames.pop();
      for (const frame of frames) {
        const line = frame.split("\n").find((l) => l.startsWith("data: "));
        if (line) yield JSON.parse(line.slice("data: ".length));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
