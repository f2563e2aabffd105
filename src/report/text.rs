//! How wide text is, so that titles wrap and labels find room. Figures are looked at with many fonts: these widths are DejaVu's, which is
//! among the widest.

/// The width of a text in units of the figure.
pub(crate) fn width(text: &str, size: f64, bold: bool) -> f64 {
    let em: f64 = text.chars().map(letter).sum();
    em * size * if bold { 1.1 } else { 1.0 }
}

/// Parts of an em.
fn letter(c: char) -> f64 {
    match c {
        'i' | 'j' | 'l' | '\'' => 0.28,
        ' ' | '.' | ',' | ':' | ';' | '|' | '!' | 'I' | 'f' | 't' => 0.36,
        '(' | ')' | '[' | ']' | '-' | 'r' => 0.41,
        'm' | 'w' | 'M' | 'W' | '%' | '@' | '…' => 0.96,
        '+' | '=' | '<' | '>' | '~' | '±' => 0.84,
        'A'..='Z' => 0.72,
        c if c.is_ascii() => 0.62,
        _ => 0.9,
    }
}

/// The text in lines that are no wider than `most`; a word that is wider alone is cut.
pub(crate) fn wrap(text: &str, size: f64, bold: bool, most: f64) -> Vec<String> {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if width(&format!("{line} {word}"), size, bold) <= most => *line += &format!(" {word}"),
            _ => lines.push(cut(word, size, bold, most)),
        }
    }
    lines
}

/// The text, or as much of its beginning as fits, with a sign that something is missing.
pub(crate) fn cut(text: &str, size: f64, bold: bool, most: f64) -> String {
    if width(text, size, bold) <= most {
        return text.to_string();
    }
    let mut out = String::new();
    for c in text.chars() {
        if width(&format!("{out}{c}…"), size, bold) > most {
            break;
        }
        out.push(c);
    }
    out + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_and_lose_no_word() {
        let text = "What embeddings of different networks know of each other, with a warm-up";
        let lines = wrap(text, 14.0, true, 200.0);
        assert!(lines.len() > 2 && lines.iter().all(|l| width(l, 14.0, true) <= 200.0), "{lines:?}");
        assert_eq!(lines.join(" "), text);
        assert!(cut("a-very-long-name-without-a-space", 11.0, false, 60.0).ends_with('…'));
        assert_eq!(cut("short", 11.0, false, 60.0), "short");
        // 124.47 by the font's own table of advances (Pillow, DejaVu Sans at 16).
        assert!((width("Hamburgefonts", 16.0, false) - 124.47).abs() < 3.0, "{}", width("Hamburgefonts", 16.0, false));
    }
}
