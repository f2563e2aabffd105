//! The verdicts on what was expected before the first run. The tests are those that the plan names: a paired t-test over seeds and the
//! interval over test images; Holm's correction over all hypotheses but the first, which is the primary one.

use super::{Pair, Results};
use crate::error::Result;
use crate::eval::stats;
use crate::report::table::signed;
use crate::report::{Cell, Section, Table};

/// The level of every test.
const LEVEL: f64 = 0.05;

/// What became of a hypothesis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The difference is above zero by both tests.
    Shown,
    /// It is below zero by both tests.
    OtherWay,
    /// All seeds are there and the tests do not agree on a difference.
    NotShown,
    /// Seeds are missing.
    Open,
}

impl Verdict {
    /// In tables.
    pub fn words(self) -> &'static str {
        match self {
            Verdict::Shown => "shown",
            Verdict::OtherWay => "shown the other way",
            Verdict::NotShown => "not shown",
            Verdict::Open => "open",
        }
    }

    /// `p` is corrected. Without answers by image, seeds alone decide.
    fn of(complete: bool, difference: f64, p: Option<f64>, over_images: Option<(f64, f64)>) -> Verdict {
        let beyond = over_images.is_none_or(|(low, high)| if difference > 0.0 { low > 0.0 } else { high < 0.0 });
        match p {
            _ if !complete => Verdict::Open,
            Some(p) if p < LEVEL && beyond && difference > 0.0 => Verdict::Shown,
            Some(p) if p < LEVEL && beyond && difference < 0.0 => Verdict::OtherWay,
            _ => Verdict::NotShown,
        }
    }
}

/// A hypothesis with what was found.
pub struct Judged {
    /// In a sentence.
    pub says: String,
    /// What was found; none where no seed has both settings.
    pub pair: Option<Pair>,
    /// Of the paired t-test; corrected, unless it is the primary one. None for less than two seeds.
    pub p: Option<f64>,
    /// What became of it.
    pub verdict: Verdict,
    /// Seeds that the plan asks for.
    pub seeds: usize,
}

impl Results<'_> {
    /// Every hypothesis of the plan, in its order.
    pub fn judged(&self) -> Result<Vec<Judged>> {
        let questions = self.questions();
        let mut found = vec![];
        for hypothesis in &self.plan.hypotheses {
            let question = questions.iter().find(|q| q.shown().starts_with(&hypothesis.question));
            found.push(question.map(|q| self.pair(q, &hypothesis.less, &hypothesis.more)).transpose()?.flatten());
        }
        let p: Vec<Option<f64>> = found.iter().map(|pair| stats::paired_t(&pair.as_ref()?.seeds)).collect();
        // What is not there yet counts as 1: the correction is for all that were written down, not for those that happen to be finished.
        let corrected = stats::holm(&p.iter().skip(1).map(|p| p.unwrap_or(1.0)).collect::<Vec<_>>());
        let judge = |(i, pair): (usize, Option<Pair>)| {
            let hypothesis = &self.plan.hypotheses[i];
            let of = |name: &str| self.plan.settings().find(|(_, s)| s.name == name).map_or(0, |(group, _)| group.seeds.len());
            let seeds = of(&hypothesis.more).min(of(&hypothesis.less));
            let p = if i == 0 { p[0] } else { p[i].map(|_| corrected[i - 1]) };
            let complete = pair.as_ref().is_some_and(|pair| pair.seeds.len() == seeds);
            let verdict = pair.as_ref().map_or(Verdict::Open, |pair| Verdict::of(complete, pair.difference, p, pair.over_images));
            Judged { says: hypothesis.says.clone(), pair, p, verdict, seeds }
        };
        Ok(found.into_iter().enumerate().map(judge).collect())
    }

    /// Hypotheses down, with difference, intervals and verdict.
    pub fn verdicts(&self) -> Result<Table> {
        let columns =
            ["hypothesis", "verdict", "difference (points)", "95 % over seeds", "95 % over images", "p over seeds, corrected", "seeds"];
        let mut table = Table::new("", &columns);
        let interval =
            |i: Option<(f64, f64)>| i.map_or(Cell::Empty, |(low, high)| Cell::text(format!("{} to {}", signed(low), signed(high))));
        for (i, judged) in self.judged()?.into_iter().enumerate() {
            let says = if i == 0 { format!("{} (primary)", judged.says) } else { judged.says };
            let pair = judged.pair.as_ref();
            table.push(vec![
                Cell::text(says),
                Cell::text(judged.verdict.words()),
                pair.map_or(Cell::Empty, |p| Cell::difference(p.difference, None)),
                interval(pair.and_then(|p| p.over_seeds)),
                interval(pair.and_then(|p| p.over_images)),
                judged.p.map_or(Cell::Empty, |p| Cell::text(stats::shown_p(p))),
                Cell::text(format!("{} of {}", pair.map_or(0, |p| p.seeds.len()), judged.seeds)),
            ]);
        }
        // Of what is open there are no numbers yet.
        Ok(table.without_empty_columns())
    }

    pub(super) fn hypotheses(&self) -> Result<Section> {
        let mut section = Section::new("What was expected, and what was found");
        if self.plan.hypotheses.is_empty() {
            return Ok(section);
        }
        section.table(self.verdicts()?);
        section.text("The hypotheses and their tests were written into the plan before its first run. One is shown if the difference is above zero by a paired t-test over seeds (5 %, two-sided) and the 95 % interval over test images leaves out zero. The first stands alone; the p values of the others are corrected by Holm's method over all of them, those that are open counting as 1. Whatever else this page compares is exploration.");
        Ok(section)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_all_seeds_and_both_tests() {
        let (clear, unclear) = (Some((0.2, 1.8)), Some((-0.1, 1.9)));
        assert_eq!(Verdict::of(true, 1.0, Some(0.01), clear), Verdict::Shown);
        assert_eq!(Verdict::of(true, 1.0, Some(0.01), None), Verdict::Shown);
        assert_eq!(Verdict::of(true, 1.0, Some(0.06), clear), Verdict::NotShown);
        assert_eq!(Verdict::of(true, 1.0, Some(0.01), unclear), Verdict::NotShown);
        assert_eq!(Verdict::of(true, -1.0, Some(0.01), Some((-1.8, -0.2))), Verdict::OtherWay);
        assert_eq!(Verdict::of(true, -1.0, Some(0.01), unclear), Verdict::NotShown);
        assert_eq!(Verdict::of(true, 1.0, None, clear), Verdict::NotShown);
        assert_eq!(Verdict::of(false, 1.0, Some(0.01), clear), Verdict::Open);
    }
}
