// One request after the other over two kept connections: each waits for the answer to the one before. Says what came back.
// Usage: http_kept_client.js ADDRESS PORT REQUESTS
const http = require('http');
const crypto = require('crypto');
const agent = new http.Agent({ keepAlive: true, maxSockets: 2 });
const ask = (i) => new Promise((resolve, reject) => {
  const path = i % 2 ? `/noise/${(i * 37) % 5000}` : `/echo/${i}`;
  const options = { host: process.argv[2], port: Number(process.argv[3]), path, agent, method: i % 2 ? 'GET' : 'POST' };
  const request = http.request(options, (response) => {
    const hash = crypto.createHash('sha256');
    response.on('data', (part) => hash.update(part));
    response.on('end', () => resolve(`${path} ${response.statusCode} ${hash.digest('hex')}`));
  });
  request.on('error', reject);
  request.end(i % 2 ? undefined : Buffer.alloc((i * 131) % 20000, i));
});
(async () => {
  const requests = Number(process.argv[4]);
  const lines = await Promise.all([0, 1].map(async (which) => {
    const answers = [];
    for (let i = which; i < requests; i += 2) answers.push(await ask(i));
    return answers.join('\n');
  }));
  console.log(lines.join('\n'));
  agent.destroy();
})();
