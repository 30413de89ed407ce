-- How the reward grows with the weights that made the samples.
SELECT weight_version_min AS version, count(*) AS samples, round(avg(reward), 3) AS reward,
       round(avg(response_tokens), 1) AS tokens
FROM jackfield_experiences
WHERE partition = 'train'
GROUP BY version
ORDER BY version;

-- The tasks whose answers differ most in reward: there is something to learn.
SELECT task, count(*) AS samples, min(reward) AS worst, max(reward) AS best
FROM jackfield_experiences
WHERE reward IS NOT NULL
GROUP BY task
ORDER BY best - worst DESC, task
LIMIT 5;

-- The worst answers, to be read.
SELECT reward, finish_reason, prompt, response
FROM jackfield_experiences
WHERE reward IS NOT NULL
ORDER BY reward, created
LIMIT 5;
