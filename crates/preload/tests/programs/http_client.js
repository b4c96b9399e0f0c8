// Many requests over a few kept connections; says what came back. Usage: http_client.js ADDRESS PORT
const http = require('http');
const crypto = require('crypto');
const agent = new http.Agent({ keepAlive: true, maxSockets: 8 });
const ask = (path, body) => new Promise((resolve, reject) => {
  const request = http.request({ host: process.argv[2], port: Number(process.argv[3]), path, agent, method: body ? 'POST' : 'GET' }, (response) => {
    const hash = crypto.createHash('sha256');
    let size = 0;
    response.on('data', (part) => { hash.update(part); size += part.length; });
    response.on('end', () => resolve(`${path} ${response.statusCode} ${size} ${hash.digest('hex')}`));
  });
  request.on('error', reject);
  request.end(body);
});
(async () => {
  const asked = [];
  for (let i = 0; i < 300; i++) {
    asked.push(i % 3 ? ask(`/noise/${(i * 7919) % 300000}`) : ask(`/echo/${i}`, Buffer.alloc((i * 104729) % 500000, i)));
  }
  for (const line of await Promise.all(asked)) console.log(line);
  agent.destroy();
})();
