//! What was found, in three lines: who leads, by how much, and how sure that is.

use crate::error::{Result, counted};
use crate::eval::record::Record;
use crate::eval::rows::protocol_of;
use crate::eval::score::RESAMPLES;
use crate::eval::stats;
use crate::report::table::{self, signed};
use crate::rng;
use crate::run::Run;

/// One of those who are compared.
pub(in crate::commands) struct Contender {
    pub(in crate::commands) name: String,
    /// In percent, one a run.
    pub(in crate::commands) values: Vec<f64>,
    /// Was each test image answered right? In parts, where several networks answered.
    pub(in crate::commands) by_image: Option<Vec<f64>>,
}

impl Contender {
    fn mean(&self) -> f64 {
        stats::mean_std(&self.values).0
    }

    /// Are these the answers that the mean is of?
    fn answered(&self, by_image: &[f64]) -> bool {
        let share = 100.0 * by_image.iter().sum::<f64>() / by_image.len().max(1) as f64;
        (share - self.mean()).abs() < 0.005
    }
}

/// The lines; none where nothing was measured.
pub(super) fn lines(runs: &[Run], records: &[&Record]) -> Result<Vec<String>> {
    let mut lines: Vec<String> = vec![];
    lines.extend(pretraining(runs, records)?);
    lines.extend(measured(records)?);
    lines.extend(sure(runs)?);
    Ok(lines)
}

/// The runs of the dataset that most of them were trained on.
fn pretraining(runs: &[Run], records: &[&Record]) -> Result<Option<String>> {
    let all: Vec<&Run> = runs.iter().filter(|r| last(r).is_some()).collect();
    let of_datasets = table::together(&all, |r| vec![r.dataset().to_string()])?;
    let Some(own) = of_datasets.into_iter().reduce(|a, b| if b.len() > a.len() { b } else { a }) else { return Ok(None) };
    let dataset = own[0].dataset();
    if let [run] = own[..] {
        let networks: Vec<String> = (0..run.archs().len())
            .filter_map(|m| Some(format!("network {m} ({}) {:.2} %", run.archs()[m], run.accuracy(m)?.last)))
            .collect();
        let together = run.last("test.ensemble.top1").filter(|_| networks.len() > 1);
        let together = together.map_or(String::new(), |v| format!(", together {v:.2} %"));
        let epochs = counted(run.metrics.len(), "epoch");
        return Ok(Some(format!("{} on {dataset} after {epochs}: {}{together}.", run.method(), networks.join(", "))));
    }
    let mut contenders = vec![];
    for group in table::together(&own, |r| vec![r.method().to_string(), r.archs().join(", ")])? {
        let names: Vec<String> = group.iter().map(|r| r.folder.path().display().to_string()).collect();
        let of = |r: &&&Record| r.command == "accuracy" && r.dataset == dataset && r.peer.is_some() && names.contains(&r.run);
        contenders.push(Contender {
            name: format!("{} ({})", group[0].method(), group[0].archs().join(", ")),
            values: group.iter().filter_map(|r| last(r)).collect(),
            by_image: by_image(&records.iter().filter(of).copied().collect::<Vec<_>>()),
        });
    }
    let what = format!("{dataset}, own classifier after the last epoch");
    if let [one] = &contenders[..] {
        let (mean, std) = stats::mean_std(&one.values);
        let std = std.map_or(String::new(), |s| format!(" ± {s:.2}"));
        return Ok(Some(format!("{} on {what}: {mean:.2}{std} % over {} runs.", one.name, one.values.len())));
    }
    Ok(leads(&what, contenders))
}

/// The measurement of single networks that most of them went through.
fn measured(records: &[&Record]) -> Result<Option<String>> {
    let own: Vec<&Record> = records
        .iter()
        .copied()
        .filter(|r| r.metric == "top1" && r.peer.is_some() && !["accuracy", "compare"].contains(&r.command.as_str()))
        .collect();
    let what = |r: &Record| vec![r.dataset.clone(), r.command.clone(), protocol_of(r), r.variant.clone()];
    // Of equals the first: measurements stand in the order they were made.
    let Some(group) = table::together(&own, what)?.into_iter().reduce(|a, b| if b.len() > a.len() { b } else { a }) else {
        return Ok(None);
    };
    let mut contenders = vec![];
    // Several methods are compared by what a method's runs reach; networks of one, or of nobody knows which, by themselves.
    let methods = table::together(&group, |r| vec![r.method.clone()])?;
    if methods.len() > 1 && group.iter().all(|r| !r.method.is_empty()) {
        for of in table::together(&group, |r| vec![r.method.clone(), r.arch.clone()])? {
            let mut values = vec![];
            for run in table::together(&of, |r| vec![r.run.clone()])? {
                values.push(stats::mean_std(&run.iter().map(|r| r.value).collect::<Vec<_>>()).0);
            }
            contenders.push(Contender { name: format!("{} ({})", of[0].method, of[0].arch), values, by_image: by_image(&of) });
        }
        return Ok(leads(&of_what(&what(group[0])), contenders));
    }
    for of in table::together(&group, |r| vec![r.run.clone(), r.subject.clone()])? {
        let method = if of[0].method.is_empty() { String::new() } else { format!(" ({})", of[0].method) };
        let value = stats::mean_std(&of.iter().map(|r| r.value).collect::<Vec<_>>()).0;
        contenders.push(Contender { name: format!("{}{method}", of[0].subject), values: vec![value], by_image: by_image(&of) });
    }
    let name = of_what(&what(group[0]));
    if let [one] = &contenders[..] {
        return Ok(Some(format!("{} on {name}: {:.2} %.", one.name, one.mean())));
    }
    Ok(leads(&name, contenders))
}

/// A measurement in words: its dataset, and how it was made.
fn of_what(parts: &[String]) -> String {
    format!("{} ({})", parts[0], parts[1..].iter().filter(|p| !p.is_empty()).cloned().collect::<Vec<_>>().join(", "))
}

/// How often each test image was answered right; none where an answer is missing.
fn by_image(records: &[&Record]) -> Option<Vec<f64>> {
    let mut sums: Vec<f64> = vec![];
    for r in records {
        let read = |key: &str| serde_json::from_value::<Vec<i64>>(r.detail[key].clone()).ok();
        let (labels, answers) = (read("labels")?, read("predicted")?);
        if labels.len() != answers.len() || !(sums.is_empty() || sums.len() == labels.len()) {
            return None;
        }
        sums.resize(labels.len(), 0.0);
        sums.iter_mut().zip(labels.iter().zip(&answers)).for_each(|(sum, (l, a))| *sum += f64::from(u8::from(l == a)));
    }
    (!sums.is_empty()).then(|| sums.iter().map(|s| s / records.len() as f64).collect())
}

/// Who leads whom by how much, and in what interval.
pub(in crate::commands) fn leads(what: &str, mut contenders: Vec<Contender>) -> Option<String> {
    contenders.sort_by(|a, b| b.mean().total_cmp(&a.mean()));
    let [first, second, ..] = &contenders[..] else { return None };
    let lead = first.mean() - second.mean();
    let verdict = |(low, high): (f64, f64), over: &str| {
        let told = if low > 0.0 { "the lead is shown" } else { "not told apart from zero" };
        format!("95 % over {over} {} to {}, {told}", signed(low), signed(high))
    };
    let half = welch(&first.values, &second.values);
    let sure = match (half, &first.by_image, &second.by_image) {
        (Some(half), ..) => verdict((lead - half, lead + half), "runs"),
        // Only of answers that these numbers are of: what ships may be of another epoch than the last.
        (None, Some(a), Some(b)) if a.len() == b.len() && first.answered(a) && second.answered(b) => {
            let differences: Vec<f64> = a.iter().zip(b).map(|(a, b)| 100.0 * (a - b)).collect();
            verdict(stats::bootstrap_mean(&differences, RESAMPLES, &mut rng::stream(1, "paired images", &[])), "test images")
        }
        _ => "without an interval; `mcl-eval compare` gives one".to_string(),
    };
    if signed(lead) == signed(0.0) {
        let level = contenders.iter().filter(|c| signed(first.mean() - c.mean()) == signed(0.0)).count();
        return Some(format!("Nobody leads on {what}: {level} are level at {:.2} %, {} among them.", first.mean(), first.name));
    }
    Some(format!(
        "{} leads on {what}: {:.2} %. {} follows with {:.2} %; the lead is {} points ({sure}).",
        first.name,
        first.mean(),
        second.name,
        second.mean(),
        signed(lead)
    ))
}

/// Half of the 95 % interval of a difference of means, with the fewer degrees of freedom of the two; none below two runs each.
fn welch(a: &[f64], b: &[f64]) -> Option<f64> {
    let ((_, sa), (_, sb)) = (stats::mean_std(a), stats::mean_std(b));
    let error = (sa?.powi(2) / a.len() as f64 + sb?.powi(2) / b.len() as f64).sqrt();
    Some(stats::t_975(a.len().min(b.len()) - 1) * error)
}

/// Over what the numbers can be trusted.
fn sure(runs: &[Run]) -> Result<Option<String>> {
    let all: Vec<&Run> = runs.iter().collect();
    let groups = table::together(&all, |r| vec![r.dataset().to_string(), r.method().to_string(), r.archs().join(", ")])?;
    let Some(least) = groups.iter().map(Vec::len).min() else { return Ok(None) };
    Ok(Some(match least {
        1 => "One run of a method is one draw: how another seed would come out is not known from this report.".to_string(),
        n => format!("At least {n} runs of every method; intervals over runs hold for other seeds, those over test images do not."),
    }))
}

/// The last test accuracy, mean over the networks.
fn last(run: &Run) -> Option<f64> {
    let values: Vec<f64> = (0..run.archs().len()).filter_map(|m| Some(run.accuracy(m)?.last)).collect();
    (!values.is_empty()).then(|| stats::mean_std(&values).0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_names_leader_lead_and_interval() {
        let of = |name: &str, values: &[f64]| Contender { name: name.into(), values: values.to_vec(), by_image: None };
        // Means 72 and 70, deviations 1: the error is the root of 2/3, t(2) = 4.3027, half 3.5131.
        let line = leads("cifar100", vec![of("b", &[69.0, 70.0, 71.0]), of("a", &[71.0, 72.0, 73.0])]).unwrap();
        assert!(line.starts_with("a leads on cifar100: 72.00 %. b follows with 70.00 %; the lead is +2.00 points"), "{line}");
        assert!(line.contains("-1.51 to +5.51, not told apart from zero"), "{line}");
        let images = |name: &str, right: usize| Contender {
            name: name.into(),
            values: vec![right as f64],
            by_image: Some((0..100).map(|i| f64::from(u8::from(i < right))).collect()),
        };
        let line = leads("x", vec![images("c", 50), images("d", 90)]).unwrap();
        assert!(line.contains("d leads") && line.contains("over test images +3") && line.contains("the lead is shown"), "{line}");
        assert!(leads("x", vec![of("a", &[1.0]), of("b", &[2.0])]).unwrap().contains("without an interval"));
        // Answers of another epoch than the numbers are of.
        let later = Contender { values: vec![92.0], ..images("d", 90) };
        assert!(leads("x", vec![images("c", 50), later]).unwrap().contains("without an interval"));
        assert_eq!(
            leads("x", vec![of("a", &[3.0]), of("b", &[3.0]), of("c", &[1.0])]).unwrap(),
            "Nobody leads on x: 2 are level at 3.00 %, a among them."
        );
    }
}
