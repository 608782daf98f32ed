// Markdown to DOM nodes. Text only ever becomes text nodes: no HTML of a reply is parsed.

const escaped = /\\([\\`*_{}[\]()#+\-.!|>~])/y;
const code = /(`+)([\s\S]*?[^`])\1(?!`)/y;
const link = /\[([^\]\n]*)\]\(\s*<?([^)\s>]+)>?(?:\s+"[^"\n]*")?\s*\)/y;
const bare = /https?:\/\/[^\s<>)\]"']*[^\s<>)\]"'.,;:!?]/y;
const strong = /(\*\*|__)(?=\S)([\s\S]*?\S)\1/y;
const emphasis = /(\*|_)(?=\S)([^*_]*?[^*_\s])\1(?!\w)/y;
const struck = /~~(?=\S)([\s\S]*?\S)~~/y;

function element(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

function anchor(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  // Nothing that runs, and nothing of this server.
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  const node = element("a", ...children);
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

/** The nodes of a line's text. */
export function inline(text, depth = 0) {
  const nodes = [];
  let plain = "";
  let at = 0;
  const push = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  const match = (rule) => {
    rule.lastIndex = at;
    return rule.exec(text);
  };
  while (at < text.length) {
    const c = text[at];
    let m = null;
    let node = null;
    if (c === "\\" && (m = match(escaped))) {
      plain += m[1];
      at += m[0].length;
      continue;
    }
    if (depth < 8) {
      if (c === "`" && (m = match(code))) {
        node = element("code", m[2].replace(/^ (.*\S.*) $/, "$1"));
      } else if (c === "[" && (m = match(link))) {
        node = anchor(m[2], inline(m[1], depth + 1));
      } else if (c === "h" && (m = match(bare))) {
        node = anchor(m[0], [m[0]]);
      } else if ((c === "*" || c === "_") && (m = match(strong))) {
        node = element("strong", ...inline(m[2], depth + 1));
      } else if (c === "*" || (c === "_" && !/\w/.test(text[at - 1] ?? ""))) {
        m = match(emphasis);
        if (m) node = element("em", ...inline(m[2], depth + 1));
      } else if (c === "~" && (m = match(struck))) {
        node = element("del", ...inline(m[1], depth + 1));
      }
    }
    if (node) {
      push(node);
      at += m[0].length;
    } else {
      plain += c;
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function fenced(lines, at) {
  const open = /^( {0,3})(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/.exec(lines[at]);
  if (!open) return null;
  const [, indent, mark, language] = open;
  const text = [];
  let i = at + 1;
  const close = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  while (i < lines.length && !close.test(lines[i])) {
    text.push(lines[i].startsWith(indent) ? lines[i].slice(indent.length) : lines[i]);
    i += 1;
  }
  const inner = element("code", text.join("\n"));
  if (language) inner.dataset.language = language;
  return [element("pre", inner), i + 1];
}

const cells = (line) =>
  line
    .trim()
    .replace(/^\||\|$/g, "")
    .split(/(?<!\\)\|/)
    .map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines, at) {
  const rule = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
  if (!lines[at].includes("|") || !rule.test(lines[at + 1] ?? "")) return null;
  const row = (line, name) =>
    element("tr", ...cells(line).map((cell) => element(name, ...inline(cell))));
  const head = row(lines[at], "th");
  if (head.children.length !== cells(lines[at + 1]).length) return null;
  const body = [];
  let i = at + 2;
  while (i < lines.length && lines[i].includes("|")) {
    body.push(row(lines[i], "td"));
    i += 1;
  }
  return [element("table", element("thead", head), element("tbody", ...body)), i];
}

const item = /^( *)([-*+]|\d{1,9}[.)])( +)(.*)$/;

function list(lines, at, depth) {
  const first = item.exec(lines[at]);
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered && Number.parseInt(first[2], 10) !== 1) node.start = Number.parseInt(first[2], 10);
  const indent = first[1].length;
  let i = at;
  while (i < lines.length) {
    const m = item.exec(lines[i]);
    if (!m || m[1].length !== indent || /\d/.test(m[2]) !== ordered) break;
    const inside = indent + m[2].length + 1;
    const own = [m[4]];
    i += 1;
    while (i < lines.length) {
      const blank = lines[i].trim() === "";
      const deeper = lines[i].search(/\S/) >= inside;
      if (!deeper && !(blank && (lines[i + 1] ?? "").search(/\S/) >= inside)) break;
      own.push(blank ? "" : lines[i].slice(inside));
      i += 1;
    }
    const children = blocks(own, depth + 1);
    // One paragraph is the item itself.
    const alone = children[0]?.nodeName === "P" ? [...children[0].childNodes] : [children[0] ?? ""];
    node.append(element("li", ...alone, ...children.slice(1)));
    while (lines[i]?.trim() === "" && item.exec(lines[i + 1] ?? "")?.[1].length === indent) i += 1;
  }
  return [node, i];
}

function blocks(lines, depth) {
  const nodes = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (line.trim() === "") {
      i += 1;
      continue;
    }
    const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (heading) {
      nodes.push(element(`h${heading[1].length}`, ...inline(heading[2])));
      i += 1;
      continue;
    }
    if (/^ {0,3}([-*_])( *\1){2,} *$/.test(line)) {
      nodes.push(element("hr"));
      i += 1;
      continue;
    }
    const found = fenced(lines, i) ?? table(lines, i) ?? (depth < 8 ? list(lines, i, depth) : null);
    if (found) {
      nodes.push(found[0]);
      i = found[1];
      continue;
    }
    if (depth < 8 && /^ {0,3}>/.test(line)) {
      const own = [];
      while (i < lines.length && /^ {0,3}>/.test(lines[i])) {
        own.push(lines[i].replace(/^ {0,3}> ?/, ""));
        i += 1;
      }
      nodes.push(element("blockquote", ...blocks(own, depth + 1)));
      continue;
    }
    const text = [line];
    i += 1;
    const starts = /^ {0,3}(#{1,6}\s|>|```|~~~|[-*+] |\d{1,9}[.)] )/;
    while (i < lines.length && lines[i].trim() !== "" && !starts.test(lines[i])) {
      text.push(lines[i]);
      i += 1;
    }
    const paragraph = element("p");
    text.forEach((part, n) => {
      if (n > 0) paragraph.append(element("br"));
      paragraph.append(...inline(part.trim()));
    });
    nodes.push(paragraph);
  }
  return nodes;
}

/** A fragment with the nodes of a text in Markdown. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocks(text.replaceAll("\r\n", "\n").split("\n"), 0));
  return fragment;
}
