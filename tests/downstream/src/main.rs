//! Trains an adapter that names the topic of a text, then lets it name one: `downstream MODEL DATA.csv TEXT`.

use std::ops::ControlFlow;

use zofo::{
    DType, Event, Inference, Model, Result, Trainer,
    cluster::Cluster,
    data::DataSpec,
    devices,
    generate::{GenerateSpec, generate},
};

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, data, text] = args.as_slice() else { panic!("usage: downstream MODEL DATA.csv TEXT") };

    let model = Model::open(model)?;
    let data = DataSpec::new(data).template("{text}\nTopic:")?.labels("label", "World,Sports".parse()?);
    let print = |event: &Event| {
        if let Event::Step(report) = event {
            println!("step {} loss {:.3}", report.step, report.loss);
        }
    };
    let run = Trainer::builder()
        .model(model.clone())
        .data(data)
        .cluster(Cluster::virtual_cpus(1, 1))
        .steps(8)
        .lr(3e-3)
        .on_event(print)
        .build()?
        .run()?;

    let mut tuned = Inference::load(devices::open("cpu", None)?, &model, Some(&run.adapter), 256, DType::F32)?;
    let prompt = format!("{text}\nTopic:");
    let answer = generate(&mut tuned, &model, &prompt, &GenerateSpec::default().max_tokens(4), &mut |_| ControlFlow::Continue(()))?;
    println!("{text}:{}", answer.text);
    Ok(())
}
