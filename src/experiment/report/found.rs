//! What came out, in three lines: who leads, by how much, and how sure that is.

use super::{Pair, Results};
use crate::error::Result;
use crate::report::table::signed;

impl Results<'_> {
    /// Of the first group: the leader on its first question, its last setting against its first, and how many differences are shown.
    pub(super) fn found(&self) -> Result<Vec<String>> {
        let group = &self.plan.groups[0];
        let questions = self.questions();
        let names: Vec<&str> = group.settings.iter().map(|s| s.name.as_str()).collect();
        let Some(question) = questions.first() else { return Ok(vec![]) };
        let mut ranked: Vec<(&str, f64)> = vec![];
        for &name in &names {
            let values = self.values(name, question);
            if !values.is_empty() {
                ranked.push((name, values.iter().map(|v| v.1).sum::<f64>() / values.len() as f64));
            }
        }
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let [(leader, best), (second, next), ..] = ranked[..] else { return Ok(vec![]) };
        let what = question.shown().replacen(": ", ", ", 1);
        let mut lines = vec![format!("{leader} has the highest mean on {what}: {best:.2} %. {second} follows with {next:.2} %.")];
        if let Some(pair) = self.pair(question, second, leader)? {
            lines[0] += &format!(" The lead is {} points: {}.", signed(pair.difference), sure(&pair));
        }
        let (first, last) = (names[0], names[names.len() - 1]);
        let mut pairs = vec![];
        for question in &questions {
            for name in &names[1..] {
                pairs.extend(self.pair(question, first, name)?);
            }
        }
        let own: Vec<&Pair> = pairs.iter().filter(|p| p.b == last).collect();
        if let Some(pair) = own.first().filter(|_| last != first) {
            let ahead = own.iter().filter(|p| p.difference > 0.0).count();
            lines.push(format!(
                "{last} against {first}: {} points there ({}); ahead in {ahead} of {} measurements.",
                signed(pair.difference),
                sure(pair),
                own.len()
            ));
        }
        let shown = pairs.iter().filter(|p| is_shown(p)).count();
        let seeds = pairs.iter().map(|p| p.seeds.len()).max().unwrap_or(0);
        lines.push(format!(
            "Of {} differences to {first}, {} both over {seeds} seeds and over test images; nothing is corrected for their number.",
            pairs.len(),
            match shown {
                0 => "none leaves out zero".to_string(),
                1 => "1 leaves out zero".to_string(),
                n => format!("{n} leave out zero"),
            }
        ));
        Ok(lines)
    }
}

/// Do both intervals leave out zero? One seed shows nothing of others.
fn is_shown(pair: &Pair) -> bool {
    let out = |interval: Option<(f64, f64)>| interval.is_some_and(|(low, high)| low > 0.0 || high < 0.0);
    out(pair.over_seeds) && (pair.over_images.is_none() || out(pair.over_images))
}

/// How sure a difference is.
fn sure(pair: &Pair) -> String {
    match pair.over_seeds {
        Some((low, high)) => {
            let verdict = if is_shown(pair) { "shown at this size" } else { "not told apart from zero" };
            format!("95 % over {} seeds {} to {}, {verdict}", pair.seeds.len(), signed(low), signed(high))
        }
        None => match pair.over_images {
            Some((low, high)) => format!("95 % over test images {} to {}; one seed, so others may differ", signed(low), signed(high)),
            None => "one seed, without an interval".to_string(),
        },
    }
}
