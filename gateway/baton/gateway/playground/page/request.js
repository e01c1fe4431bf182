// Builds the body of a chat request, and the equivalent curl command. Pure.

const STREAM = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };

/** Returns the body. `values` come from settings.js. */
export function requestBody(model, values, messages) {
  const { sampling, format, schema, tools, toolChoice, parallelCalls } = values;
  const body = { ...(model ? { model } : {}), messages, ...sampling, ...STREAM };
  if (format === "json_object") body.response_format = { type: "json_object" };
  if (format === "json_schema") body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools.length) {
    body.tools = tools;
    if (toolChoice) body.tool_choice = choiceOf(toolChoice);
    if (!parallelCalls) body.parallel_tool_calls = false;
  }
  return body;
}

/** Returns a command for a POSIX shell, with a variable in place of the key. */
export function asCurl(url, body, withKey) {
  const lines = [`curl -N ${quoted(url)}`, "-H 'content-type: application/json'"];
  if (withKey) lines.push('-H "authorization: Bearer $BATON_API_KEY"');
  const { stream_options: _, ...plain } = body;
  lines.push(`-d ${quoted(JSON.stringify(plain, null, 2))}`);
  return lines.join(" \\\n  ");
}

function choiceOf(choice) {
  return choice === "required" || choice === "none" ? choice : namedChoice(choice.replace(/^function:/, ""));
}

function namedChoice(name) {
  return { type: "function", function: { name } };
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}
