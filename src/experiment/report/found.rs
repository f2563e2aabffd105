//! What came out, in three lines: who leads, by how much, and how sure that is.

use super::{Judged, Pair, Results, Verdict};
use crate::error::{Result, counted};
use crate::experiment::rows::Question;
use crate::report::table::signed;

impl Results<'_> {
    /// Who leads so far, and what became of the hypotheses; of a plan without any, how many differences are shown.
    pub(super) fn found(&self) -> Result<Vec<String>> {
        let mut lines = self.led()?;
        let told = expected(&self.judged()?);
        // Where differences were expected beforehand, their verdicts take the place of a count of all differences.
        if told.is_some() {
            lines.pop();
        }
        if lines.is_empty() {
            lines.push("Who leads is not known yet: no two settings are finished.".to_string());
        }
        lines.extend(told);
        Ok(lines)
    }

    /// Of the first group: the leader on its first question, its last setting against its first, and, last, how many differences are shown.
    fn led(&self) -> Result<Vec<String>> {
        let group = &self.plan.groups[0];
        let questions = self.questions();
        let names: Vec<&str> = group.settings.iter().map(|s| s.name.as_str()).collect();
        let Some(question) = questions.first() else { return Ok(vec![]) };
        let mut ranked: Vec<(&str, f64)> = names.iter().filter_map(|&name| Some((name, self.mean(name, question)?))).collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let [(leader, best), (second, next), ..] = ranked[..] else { return Ok(vec![]) };
        let what = question.shown().replacen(": ", ", ", 1);
        let among = if self.plan.groups.len() > 1 { format!("Under \"{}\", ", group.title) } else { String::new() };
        let mut lines = vec![format!("{among}{leader} has the highest mean on {what}: {best:.2} %. {second} follows with {next:.2} %.")];
        if let Some(pair) = self.pair(question, second, leader)? {
            // Means of other seeds differ by something else than the paired difference.
            let alike = [leader, second].iter().all(|name| self.values(name, question).len() == pair.seeds.len());
            let on = if alike { String::new() } else { format!(", on what both have ({})", counted(pair.seeds.len(), "seed")) };
            lines[0] += &format!(" The lead is {} points{on}: {}.", signed(pair.difference), sure(&pair));
        }
        lines.extend(self.above(leader, best, question)?);
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
            let there =
                format!(": {} points there ({}); ahead in {ahead} of {} measurements.", signed(pair.difference), sure(pair), own.len());
            let same = (leader, second) == (last, first);
            lines.push(match same {
                true => format!("{last} is ahead of {first} in {ahead} of {} measurements.", own.len()),
                false => format!("{last} against {first}{there}"),
            });
        }
        let shown = pairs.iter().filter(|p| is_shown(p)).count();
        let seeds = pairs.iter().map(|p| p.seeds.len()).max().unwrap_or(0);
        lines.push(format!(
            "Of {} differences to {first}, {} both over {} and over test images; nothing is corrected for their number.",
            pairs.len(),
            match shown {
                0 => "none leaves out zero".to_string(),
                1 => "1 leaves out zero".to_string(),
                n => format!("{n} leave out zero"),
            },
            counted(seeds, "seed")
        ));
        Ok(lines)
    }

    /// A setting of another group may be better than the leader of the first one: the best of those with the leader's seeds.
    fn above(&self, leader: &str, best: f64, question: &Question) -> Result<Option<String>> {
        let seeds = |name: &str| self.values(name, question).len();
        let others = self.plan.groups[1..].iter().flat_map(|group| &group.settings).map(|s| s.name.as_str());
        let alike = others.filter(|name| seeds(name) == seeds(leader));
        let better = alike.filter_map(|name| Some((name, self.mean(name, question)?))).filter(|(_, value)| *value > best);
        let Some((name, value)) = better.max_by(|a, b| a.1.total_cmp(&b.1)) else { return Ok(None) };
        let Some(pair) = self.pair(question, leader, name)? else { return Ok(None) };
        Ok(Some(format!("Higher still is {name}: {value:.2} %, {} points to {leader} ({}).", signed(pair.difference), sure(&pair))))
    }

    /// Over the seeds of a setting; none where none is finished.
    fn mean(&self, name: &str, question: &Question) -> Option<f64> {
        let values = self.values(name, question);
        (!values.is_empty()).then(|| values.iter().map(|v| v.1).sum::<f64>() / values.len() as f64)
    }
}

/// What became of the hypotheses, the primary one first; none where there are none.
fn expected(judged: &[Judged]) -> Option<String> {
    let primary = judged.first()?;
    let verdicts = [Verdict::Shown, Verdict::OtherWay, Verdict::NotShown, Verdict::Open].map(|verdict| {
        let count = judged.iter().filter(|j| j.verdict == verdict).count();
        (count > 0).then(|| format!("{count} {}", verdict.words()))
    });
    let verdicts: Vec<String> = verdicts.into_iter().flatten().collect();
    let (count, says) = (counted(judged.len(), "expectation"), primary.says.trim_end_matches('.'));
    Some(format!("Of {count} written down before: {}. The primary one ({says}): {}.", verdicts.join(", "), primary.verdict.words()))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hypotheses_are_told_in_a_line() {
        let of = |verdict| Judged { says: "a leads b".into(), pair: None, p: None, verdict, seeds: 3 };
        assert_eq!(expected(&[]), None);
        let told = expected(&[of(Verdict::NotShown), of(Verdict::Open), of(Verdict::Open)]).unwrap();
        assert_eq!(told, "Of 3 expectations written down before: 1 not shown, 2 open. The primary one (a leads b): not shown.");
    }
}
