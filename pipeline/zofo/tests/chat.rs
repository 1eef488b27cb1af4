//! Chat templates. What they should give is from Python's jinja2, set up as transformers sets it up.

use std::{ops::ControlFlow, time::Duration, time::SystemTime};

use serde_json::Value;
use zofo::{
    DType, ErrorKind, Inference, Model,
    chat::{self, ChatTemplate, Message},
    devices,
    generate::{GenerateSpec, Stop, generate},
};
use zofo_ops::files::{Tokenizer, gguf::Gguf};

/// Blocks with their white space, slices, filters, methods, and a refusal.
const BLOCKS: &str = "{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{% for message in loop_messages %}
    {% if message['role'] not in ['user', 'assistant'] %}
        {{ raise_exception('only user and assistant, not ' + message['role']) }}
    {% endif %}
    {% if message.role == 'user' %}
[INST] {% if loop.first and system_message %}<<SYS>>{{ system_message }}<</SYS>> {% endif %}{{ message.content.strip() }} [/INST]
    {% else %}
 {{ message.content.rstrip() + eos_token }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt and not tools %}
>{% endif %}

";

/// Dates, namespaces, loop controls, and more methods.
const DATE: &str = r#"{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{{- bos_token + "Today: " + date_string + "\n" }}
{%- set ns = namespace(turns=0, last='') %}
{%- for m in messages %}
  {%- if m.role == 'assistant' %}{% continue %}{% endif %}
  {%- set ns.turns = ns.turns + 1 %}
  {%- set ns.last = m['content'].split('is')[-1].upper() %}
  {{- '<|' ~ m.role ~ '|>' ~ m.content.replace('?', '!').lstrip() ~ loop.index0 }}
{%- endfor %}
{{- ns.turns ~ ns.last ~ (messages | length) ~ ('yes' if messages[-1]['content'].startswith('It') else 'no') }}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}"#;

const JSON: &str = "{{ messages | tojson }}{% for m in messages %}{% for k, v in m.items() %}{{ k }}={{ v | trim | upper }};{% endfor %}\
                    {% endfor %}{{ messages[0].get('name', 'nobody') }}";

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, Some("<s>".into()), Some("</s>".into())).unwrap()
}

fn conversation() -> Vec<Message> {
    vec![Message::system(" Be brief. "), Message::user(" What is <2+2>? "), Message::assistant("It's \"4\" ")]
}

#[test]
fn templates_give_what_jinja2_gives() {
    let all = conversation();
    let blocks = template(BLOCKS);
    let long = "<s>[INST] <<SYS>>Be brief.<</SYS>> What is <2+2>? [/INST]\n It's \"4\"</s>\n>";
    assert_eq!(blocks.render(&all, true).unwrap(), long);
    assert_eq!(blocks.render(&all[1..2], false).unwrap(), "<s>[INST] What is <2+2>? [/INST]\n");
    // The 26th of July 2024.
    let dated = template(DATE).at(SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000));
    let today = "<s>Today: 26 Jul 2024\n<|system|>Be brief. 0<|user|>What is <2+2>! 12 <2+2>? 3yes";
    assert_eq!(dated.render(&all, true).unwrap(), today);
    let json = "[{\"role\": \"system\", \"content\": \" Be brief. \"}, {\"role\": \"user\", \"content\": \" What is <2+2>? \"}, \
                {\"role\": \"assistant\", \"content\": \"It's \\\"4\\\" \"}]role=SYSTEM;content=BE BRIEF.;role=USER;content=WHAT IS <2+2>?;\
                role=ASSISTANT;content=IT'S \"4\";nobody";
    assert_eq!(template(JSON).render(&all, true).unwrap(), json);
}

#[test]
fn tokens_that_a_model_lacks_are_empty() {
    let bare = ChatTemplate::new("{{ bos_token }}|{{ messages[0].content }}|{{ eos_token }}", None, None).unwrap();
    assert_eq!(bare.render(&[Message::user("a")], true).unwrap(), "|a|");
}

#[test]
fn a_template_may_refuse_a_conversation() {
    let e = template(BLOCKS).render(&[Message::new("tool", "4")], true).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::InvalidArgument);
    assert!(e.message().contains("only user and assistant, not tool"), "{e}");
    let e = template("{{ raise_exception('\u{1b}[2J' * 200) }}").render(&[], true).unwrap_err();
    assert!(e.message().len() < 2500 && !e.message().contains('\u{1b}'), "{e}");
}

#[test]
fn templates_that_cannot_run_are_refused() {
    let unsupported = |source: &str, part: &str| {
        let made = ChatTemplate::new(source, None, None).and_then(|t| t.render(&conversation(), true));
        let e = made.unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Unsupported, "{e}");
        assert!(e.message().contains(part), "{e}");
    };
    unsupported("{% for %}", "syntax error");
    unsupported("{% generation %}{% endgeneration %}", "generation");
    unsupported("{{ messages | nothing }}", "nothing");
    unsupported("{{ messages[0].content.nothing() }}", "nothing");
    unsupported("{% include '/etc/passwd' %}", "passwd");
    unsupported(&" ".repeat((1 << 20) + 1), "1048577 bytes");
    let e = template("{{ messages[9].content.strip() }}").render(&[], true).unwrap_err();
    assert_eq!(*e.kind(), ErrorKind::Format, "{e}");
}

/// As long as a template may be, and as deep as that makes them: an answer or an error, and no overflow of the stack.
#[test]
fn long_chains_of_operators_have_stack() {
    for link in ["not ", "-", "1+", "1|string|string+"] {
        let source = format!("{{{{ {}1 }}}}", link.repeat(60_000 / link.len()));
        let _ = ChatTemplate::new(&source, None, None).map(|t| t.render(&conversation(), true));
    }
}

/// Work, memory and recursion end, whatever a template asks for.
#[test]
fn hostile_templates_end() {
    for source in [
        "{% for a in range(10000) %}{% for b in range(10000) %}{% for c in range(10000) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='aaaaaaaaaaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{{ 'a' * 99999999 }}",
        "{{ range(99999999) | list | join('aaaaaaaa') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[0].content.replace('', 'a' * 60000) * 999 }}",
    ] {
        let e = template(source).render(&conversation(), true).unwrap_err();
        assert_eq!(*e.kind(), ErrorKind::Format, "{source}: {e}");
    }
    let deep = format!("{}{}", "(".repeat(5000), ")".repeat(5000));
    assert!(ChatTemplate::new(&format!("{{{{ {deep} }}}}"), None, None).is_err());
    let nested = format!("{}{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000));
    assert!(ChatTemplate::new(&nested, None, None).and_then(|t| t.render(&[], true)).is_err());
}

#[test]
fn generation_ends_where_it_is_asked_to() {
    let path = zofo_testkit::shared_or_skip!("models/stories260K/hf");
    let model = Model::open(path).unwrap();
    let e = chat::prompt(model.tokenizer(), &conversation()).unwrap_err();
    assert!(*e.kind() == ErrorKind::InvalidArgument && e.message().contains("no chat template"), "{e}");
    let mut inference = Inference::load(devices::open("cpu", Some(1)).unwrap(), &model, None, 64, DType::F32).unwrap();
    let mut run =
        |spec: &GenerateSpec| generate(&mut inference, &model, "Once upon a time", spec, &mut |_| ControlFlow::Continue(())).unwrap();
    let spec = GenerateSpec::default().max_tokens(6);
    let all = run(&spec);
    assert_eq!((all.ids.len(), all.stop), (6, Stop::MaxTokens));
    let third = all.ids[2];
    let first = all.ids.iter().position(|id| *id == third).unwrap();
    let stopped = run(&spec.stops(&[third]));
    assert_eq!((&stopped.ids[..], stopped.stop), (&all.ids[..first], Stop::End));
}

#[test]
fn smollm2_sees_the_conversation_that_transformers_shows_it() {
    let golden = zofo_testkit::shared_or_skip!("goldens/smollm2_reference.json");
    let path = zofo_testkit::smollm2_or_skip!();
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let chat = &golden["chat"];
    let ids: Vec<u32> = chat["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
    let tokenizer = Tokenizer::from_gguf(Gguf::open(&path).unwrap().metadata()).unwrap();
    // The system prompt is the template's own.
    let question = [Message::user("What is 2+2?")];
    assert_eq!(ChatTemplate::of(&tokenizer).unwrap().render(&question, true).unwrap(), chat["string"].as_str().unwrap());
    assert_eq!(chat::prompt(&tokenizer, &question).unwrap(), ids);
    let own = chat::prompt(&tokenizer, &[Message::system("Be brief."), question[0].clone()]).unwrap();
    assert!(tokenizer.decode(&own).unwrap().contains("Be brief.") && own.len() < ids.len());
}
