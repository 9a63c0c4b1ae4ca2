import argparse, random, re, sys, time, json
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hotpotqa import *
from trace_trl.environments.search import SearchEnvironment
from trace_trl.environments.qa_metrics import normalize_answer, f1_score

_WORD = re.compile(r"\w+")
_STOP = frozenset("a an and are as at be been by did do does for from had has have he her his how in is it its of on or she that the their them they this to was were what when where which who whom whose why will with".split())

def words_of(text): return [w.lower() for w in _WORD.findall(text)]
def bare(title): return re.sub(r"\s*\([^)]*\)$", "", title)

def mentioned(title, text):
    want = [w for w in words_of(bare(title)) if w not in _STOP] or words_of(title)
    have = set(words_of(text))
    return sum(w in have for w in want) / len(want)

def contains(text, answer):
    return re.search(r"(?<!\w)" + re.escape(answer) + r"(?!\w)", text, re.I) is not None

def question_query(question, page_text):
    """Longest run of the question's words that the page shares, at most 8 words."""
    have = set(words_of(page_text))
    words = question.strip().rstrip("?").split()
    best = []
    for i in range(len(words)):
        for j in range(i + 1, min(i + 8, len(words)) + 1):
            run = words[i:j]
            toks = [words_of(w) for w in run]
            if not all(all(t in have or t in _STOP for t in ts) for ts in toks): break
            if words_of(run[0])[:1] and words_of(run[0])[0] in _STOP: continue
            if words_of(run[-1])[-1:] and words_of(run[-1])[-1] in _STOP: continue
            if len([t for ts in toks for t in ts if t not in _STOP]) > len([t for w in best for t in words_of(w) if t not in _STOP]):
                best = run
    return " ".join(best).strip(".,;:\"'")

def window(text, answer, before=8, after=3):
    m = re.search(r"(?<!\w)" + re.escape(answer) + r"(?!\w)", text, re.I)
    pre, post = text[:m.start()].split(), text[m.end():].split()
    # a window does not cross a sentence
    for i in range(len(pre) - 1, -1, -1):
        if pre[i].endswith(".") and len(pre[i]) > 3: pre = pre[i+1:]; break
    for i, w in enumerate(post):
        if w.endswith(".") : post = post[:i+1]; break
    return " ".join(pre[-before:] + [m.group(0)]).strip() + (" " + " ".join(post[:after]) if post[:after] and not post[0].startswith(".") else "")

class Demo:
    def __init__(self, env, context, question):
        self.env, self.state = env, env.reset({"context": context})
        self.messages = build_prompt(question)
        self.seen = []
    def act(self, thought, action):
        turn = f"Thought: {thought}\nAction: {action}"
        self.messages.append({"role": "assistant", "content": turn})
        r = self.env.step(self.state, turn)
        if r.done: return None
        self.messages.append({"role": "user", "content": r.observation})
        self.seen.append(r.observation)
        return r.observation

def finds(env, context, query, title):
    s = env.reset({"context": context})
    pages = s.index.search(query, 1)
    return bool(pages) and s.index.paragraphs[pages[0]][0] == title

def hop(rng, env, row, title, asked):
    """query that finds title, and thought"""
    opts = []
    text = dict(row["context"])[title]
    if mentioned(title, asked) >= 0.6: opts += [bare(title), title] if rng.random() < .5 else [bare(title)]
    q = question_query(row["question"], title + " " + " ".join(text))
    if len(q.split()) >= 2: opts.append(q)
    if rng.random()<.2: rng.shuffle(opts)
    for q in opts:
        if finds(env, row["context"], q, title): return q
    return None

FIRST = ["I need to look up {q}."]
NEXT = ["Now I need {q}."]
LAST = ["The answer is {a}."]
CMP = LAST
EVID=0.0

def demonstrate(row, rng, env, evidence=True):
    ctx = dict((t, " ".join(x.strip() for x in s)) for t, s in row["context"])
    q, a = row["question"], row["answer"]
    titles = list(dict.fromkeys(t for t, _ in row["supporting_facts"]))
    d = Demo(env, row["context"], q)
    if row["type"] == "comparison":
        titles.sort(key=lambda t: q.find(bare(t).split()[0]))
        for i, t in enumerate(titles):
            query = hop(rng, env, row, t, q)
            if query is None: query = t
            d.act(rng.choice(FIRST if i == 0 else NEXT).format(q=query), f"search[{query}]")
        d.act(rng.choice(CMP).format(a=a), f"finish[{a}]")
        return d.messages
    # bridge: order by what question mentions
    titles.sort(key=lambda t: -mentioned(t, q))
    if len(titles) == 2 and abs(mentioned(titles[0], q) - mentioned(titles[1], q)) < 0.2:
        # the one that names the other comes first
        if mentioned(titles[0], ctx[titles[1]]) > mentioned(titles[1], ctx[titles[0]]): titles.reverse()
    asked = q
    answer_titles = [t for t in titles if contains(ctx[t], a)]
    if not answer_titles: return None
    direct = [t for t in answer_titles if hop(rng, env, row, t, q)]
    if direct and rng.random() < 0.5: titles = [direct[0]]
    elif titles[-1] not in answer_titles: titles = titles[::-1] if rng.random() < .5 and titles[0] in answer_titles and hop(rng, env, row, titles[-1], q) else titles
    for i, t in enumerate(titles):
        query = hop(rng, env, row, t, asked)
        if query is None:
            return None
        seen = d.act(rng.choice(FIRST if i == 0 else NEXT).format(q=query), f"search[{query}]")
        asked = q + " " + " ".join(d.seen)
    text = next((s for s in reversed(d.seen) if contains(s, a)), None)
    if text is None:
        # look up
        for term in rng.sample(sorted(set(w for w in words_of(q) if w not in _STOP and len(w) > 3)), k=len(set(w for w in words_of(q) if w not in _STOP and len(w) > 3))):
            s = d.state.fork()
            obs = env.step(s, f"Action: lookup[{term}]").observation
            if contains(obs, a):
                text = d.act(f"I look for {term} on this page.", f"lookup[{term}]"); break
        else: return None
    text = text.removeprefix("Observation: ")
    th = window(text, a) if evidence and rng.random() < EVID else rng.choice(LAST).format(a=a)
    d.act(th, f"finish[{a}]")
    return d.messages

_TEMPLATES = [
    (r"\(\s*(?:[^()]*?[;,] )?born ((?:\d{1,2} )?[A-Z][a-z]+(?: \d{1,2},)? \d{4})", ["When was {t} born?", "What is the date of birth of {t}?"]),
    (r"\(\s*(?:[^()]*?[;,] )?born (?:(?:\d{1,2} )?[A-Z][a-z]+(?: \d{1,2},)? )?(\d{4})", ["In what year was {t} born?", "{t} was born in what year?"]),
    (r"is an? ([A-Z][a-z]+(?:-[A-Z][a-z]+)?) (?:\w+ )?(?:film|actress|actor|singer|footballer|politician|rock band|band|musician|writer|author)", ["What is the nationality of {t}?", "{t} is of what nationality?"]),
    (r"(?:is|was) an? ((?:\w+[ -]){1,5}?(?:film|band|actress|actor|singer|album|song|footballer|politician|company|village|town|city|magazine|novel|series|airport|university|school|director|writer|player|game))\b", ["What kind of thing is {t}?", "{t} is what?"]),
    (r"directed by ((?:[A-Z][\w.'-]+ ?){2,3})", ["Who directed {t}?", "{t} was directed by whom?"]),
    (r"written by ((?:[A-Z][\w.'-]+ ?){2,3})", ["Who wrote {t}?", "{t} was written by whom?"]),
    (r"(?:located|based) in ((?:[A-Z][\w.'-]+,? ?){1,3})", ["Where is {t} located?", "{t} is in what place?"]),
    (r"(?:founded|established|formed) in (\d{4})", ["When was {t} founded?", "{t} was founded in what year?"]),
    (r"(?:released|published) (?:in|on) ((?:[A-Z][a-z]+ )?(?:\d{1,2}, )?\d{4})", ["When was {t} released?"]),
    (r"published by ((?:[A-Z][\w.'-]+ ?){1,3})", ["Who published {t}?"]),
    (r"produced by ((?:[A-Z][\w.'-]+ ?){2,3})", ["Who produced {t}?"]),
    (r"starring ((?:[A-Z][\w.'-]+ ?){2,3})", ["Who starred in {t}?", "What actor stars in {t}?"]),
    (r"population (?:of|was) ([\d,]+)", ["What is the population of {t}?"]),
]

def synth(rows, rng, env):
    out = []
    for row in rows:
        for t, s in row["context"]:
            text = " ".join(x.strip() for x in s)
            for pat, qs in _TEMPLATES:
                m = re.search(pat, text)
                if not m: continue
                a = m.group(1).strip(" ,.")
                if not a or a in t: continue
                q = rng.choice(qs).format(t=bare(t))
                if not finds(env, row["context"], bare(t), t): continue
                d = Demo(env, row["context"], q)
                obs = d.act(rng.choice(FIRST).format(q=bare(t)), f"search[{bare(t)}]").removeprefix("Observation: ")
                if not contains(obs, a): continue
                th = window(obs, a) if rng.random() < EVID else rng.choice(LAST).format(a=a)
                d.act(th, f"finish[{a}]")
                out.append(d.messages)
    return out

if __name__ == "__main__":
    rng = random.Random(0)
    env = SearchEnvironment(1, MAX_OBSERVATION_CHARS)
    rows = load_rows(TRAIN_FILE)
    ok = 0
    from collections import Counter
    c = Counter()
    from transformers import AutoTokenizer
    tok = AutoTokenizer.from_pretrained("/tmp/h/smol")
    L = []
    for i, r in enumerate(rows):
        m = demonstrate(r, rng, env)
        c[(m is not None) and tuple(x["content"].split("Action: ")[1].split("[")[0] for x in m if x["role"] == "assistant")] += 1
        if m:
            L.append(len(tok.apply_chat_template(m, return_dict=False)))
            if i < 30: print("\n".join(x["content"] for x in m[1:]), "\n")
        elif i < 60: print("NONE", r["question"], r["answer"], r["supporting_facts"], "\n")
    print(c, sum(L) / len(L), max(L))
    s = synth(rows, rng, env)
    print(len(s)); 
    for m in rng.sample(s, 15): print("\n".join(x["content"] for x in m[1:]), "\n")
