//! Draws tables of replies with aligned columns. Columns are as wide as their text, or narrower if
//! the terminal requires it.

use unicode_width::UnicodeWidthChar;

use crate::cli::terminal::screen::cell;

/// The separator between two columns, and its form in the line below the header.
const BORDER: &str = " │ ";
const CROSS: &str = "─┼─";
/// Minimum width of a text column.
const LEAST: usize = 4;

/// The alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    Center,
    Right,
}

/// The drawn lines of a Markdown table, each with a newline. `width` is the terminal's width; 0
/// means unlimited. `None` if the lines are not a table, or if its columns do not fit.
pub fn drawn(lines: &[String], width: usize) -> Option<String> {
    let [head, rule, body @ ..] = lines else {
        return None;
    };
    let aligns: Vec<Align> = cells(rule)
        .iter()
        .map(|c| align(c))
        .collect::<Option<_>>()?;
    let head = cells(head);
    if head.len() != aligns.len() {
        return None;
    }
    let body: Vec<Vec<String>> = body.iter().map(|line| cells(line)).collect();
    let rows = || std::iter::once(&head).chain(&body);
    let wanted = |column: usize| {
        let texts = rows().filter_map(|row| row.get(column));
        let widths = texts.map(|text| cell(text, 0, false).iter().map(|l| columns(l)).max());
        widths.flatten().max().unwrap_or(0).max(1)
    };
    let mut widths: Vec<usize> = (0..aligns.len()).map(wanted).collect();
    fit(&mut widths, width)?;
    let mut out = String::new();
    for (number, row) in rows().enumerate() {
        draw_row(&mut out, row, (&widths, &aligns), number == 0);
        if number == 0 {
            let rules: Vec<String> = widths.iter().map(|n| "─".repeat(*n)).collect();
            out.push_str(&rules.join(CROSS));
            out.push('\n');
        }
    }
    Some(out)
}

/// Narrows the widest columns until the row fits.
fn fit(widths: &mut [usize], width: usize) -> Option<()> {
    let borders = columns(BORDER) * widths.len().saturating_sub(1);
    let least = |widths: &[usize]| widths.iter().map(|n| (*n).min(LEAST)).sum::<usize>();
    if width == 0 {
        return Some(());
    }
    if borders + least(widths) > width {
        return None;
    }
    while borders + widths.iter().sum::<usize>() > width {
        let widest = widths.iter_mut().max()?;
        *widest -= 1;
    }
    Some(())
}

fn draw_row(
    out: &mut String,
    row: &[String],
    (widths, aligns): (&[usize], &[Align]),
    is_head: bool,
) {
    let drawn: Vec<Vec<String>> = (widths.iter().enumerate())
        .map(|(column, width)| {
            let text = row.get(column).map_or("", String::as_str);
            cell(text, *width, is_head)
        })
        .collect();
    let height = drawn.iter().map(Vec::len).max().unwrap_or(0).max(1);
    for line in 0..height {
        let parts: Vec<String> = (drawn.iter().zip(widths).zip(aligns))
            .map(|((cell, width), align)| {
                let text = cell.get(line).map_or("", String::as_str);
                let free = width.saturating_sub(columns(text));
                let before = match align {
                    Align::Left => 0,
                    Align::Center => free / 2,
                    Align::Right => free,
                };
                format!("{}{text}{}", " ".repeat(before), " ".repeat(free - before))
            })
            .collect();
        out.push_str(parts.join(BORDER).trim_end());
        out.push('\n');
    }
}

/// The texts between the bars.
fn cells(line: &str) -> Vec<String> {
    let line = line.trim();
    let line = line.strip_prefix('|').unwrap_or(line);
    let mut cells = vec![String::new()];
    let mut escaped = false;
    for c in line.chars() {
        match (c, cells.last_mut()) {
            ('|', _) if !escaped => cells.push(String::new()),
            (c, Some(cell)) => {
                if escaped && c != '|' {
                    cell.push('\\');
                }
                if c != '\\' || escaped {
                    cell.push(c);
                }
            }
            _ => {}
        }
        escaped = c == '\\' && !escaped;
    }
    // A bar at the end of a row does not start a cell.
    if cells.len() > 1 && cells.last().is_some_and(|cell| cell.trim().is_empty()) {
        cells.pop();
    }
    cells.iter().map(|cell| cell.trim().to_owned()).collect()
}

/// Parses a cell of a Markdown delimiter row: `---`, `:-:` or `--:`. `None` for other text.
fn align(cell: &str) -> Option<Align> {
    let dashes = cell.trim_start_matches(':').trim_end_matches(':');
    if dashes.is_empty() || !dashes.chars().all(|c| c == '-') {
        return None;
    }
    Some(match (cell.starts_with(':'), cell.ends_with(':')) {
        (true, true) => Align::Center,
        (false, true) => Align::Right,
        _ => Align::Left,
    })
}

/// The width of a text in columns, without control sequences.
fn columns(text: &str) -> usize {
    let mut width = 0;
    let mut rest = text.chars();
    while let Some(c) = rest.next() {
        if c == '\u{1b}' {
            rest.by_ref().find(|c| *c == 'm');
        } else {
            width += c.width().unwrap_or(0);
        }
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(lines: &[&str], width: usize) -> Option<String> {
        let lines: Vec<String> = lines.iter().map(ToString::to_string).collect();
        drawn(&lines, width)
    }

    #[test]
    fn columns_line_up() {
        let lines = ["| a | count |", "|---|--:|", "| long **b** | 7 |", "| 漢 |"];
        let shown = table(&lines, 0).unwrap();
        let plain = shown.replace("\u{1b}[0;1m", "").replace("\u{1b}[0m", "");
        assert_eq!(
            plain,
            "a      │ count\n───────┼──────\nlong b │     7\n漢     │\n"
        );
        assert!(shown.contains("\u{1b}[0;1mb\u{1b}[0m"), "{shown:?}");
    }

    #[test]
    fn wide_tables_are_wrapped_inside_of_their_cells() {
        let text = "one two three four five six";
        let row = format!("| x | {text} |");
        let shown = table(&["| n | words |", "|---|---|", &row], 20).unwrap();
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines.iter().all(|line| columns(line) <= 20), "{shown}");
        assert_eq!(lines[2..], ["x │ one two three", "  │ four five six"]);
        // A table whose columns do not fit stays unchanged.
        assert_eq!(table(&["|a|b|c|d|e|f|", "|-|-|-|-|-|-|"], 12), None);
    }

    #[test]
    fn what_is_no_table_is_left_alone() {
        for lines in [
            &["| a |"][..],
            &["| a |", "| b |"],
            &["| a | b |", "|---|"],
            &["|---|", "| a |"],
        ] {
            assert_eq!(table(lines, 80), None, "{lines:?}");
        }
        assert_eq!(cells(r"| a \| b | c\d |"), ["a | b", r"c\d"]);
    }
}
